"""The learning rate follows the size of the model unless it is given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from fulmen_algorithm.runs.provenance import parameters_of
from fulmen_algorithm.training.default_rates import CRITIC_RATE, REINFORCEMENT, SUPERVISED
from tests.support.algorithm.run_service import notices, with_settings

RATES = [REINFORCEMENT, SUPERVISED, CRITIC_RATE]


@pytest.mark.parametrize("rate", RATES)
@given(few=st.integers(1, 10**12), more=st.integers(1, 10**12), adapters=st.booleans())
def test_a_larger_model_never_gets_a_larger_rate(rate, few, more, adapters):
    few, more = sorted((few, more))
    assert rate.large <= rate.of(more, adapters=adapters) <= rate.of(few, adapters=adapters)
    assert rate.of(few) <= rate.small


@pytest.mark.parametrize("rate", RATES)
def test_a_model_of_unknown_size_counts_as_large(rate):
    assert rate.of(0) == rate.of(10**9) == rate.large


def test_adapters_get_ten_times_the_rate_of_all_weights():
    assert (REINFORCEMENT.of(600_000_000, adapters=True), REINFORCEMENT.of(600_000_000)) == (1e-5, 1e-6)


def test_parameters_are_counted_in_all_files_of_a_model(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert parameters_of(tmp_path) == parameters_of(tiny_model) == model.num_parameters()


def test_a_file_that_cannot_be_read_makes_the_size_unknown(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert parameters_of(tmp_path) == 0


async def test_a_run_says_which_rate_it_takes_and_keeps_to_it(grpo_draft, carry_out, tiny_model):
    entry = await carry_out(with_settings(grpo_draft, learning_rate="auto", warmup_steps=0))
    assert entry.run.provenance["policy.parameters"] == str(parameters_of(tiny_model))
    assert [t for t in notices(entry) if t.startswith("learning_rate is 0.0003: the default for")]
    assert {s.values["learning_rate"] for s in entry.events.steps() if "learning_rate" in s.values} == {3e-4}
