"""Learning rate, length of answers and number format follow the size of the model unless they are given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from fulmen_algorithm.algorithms.grpo import GrpoSettings
from fulmen_algorithm.algorithms.sft import SftSettings
from fulmen_algorithm.policy.engine_settings import VllmEngine
from fulmen_algorithm.runs.creation.model_defaults import chosen, doubts, model_facts
from fulmen_algorithm.runs.provenance import parameters_of
from fulmen_algorithm.training.compute import Precision
from fulmen_algorithm.training.defaults import CRITIC_RATE, REINFORCEMENT, SUPERVISED, ModelFacts
from fulmen_algorithm.training.settings import FullWeights
from tests.support.algorithm.run_service import ALGORITHMS, notices, with_settings

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


@pytest.mark.parametrize(
    ("parameters", "longest", "tokens"),
    [
        (500_000, 0, 64),
        (500_000, 100, 50),
        (50_000_000, 0, 512),
        (4_000_000_000, 40_960, 1024),
        (4_000_000_000, 1024, 512),
        (0, 0, 1024),
    ],
)
def test_answers_of_larger_models_may_be_longer_and_leave_room_for_a_prompt(parameters, longest, tokens):
    assert ModelFacts(parameters=parameters, longest=longest).answer_tokens == tokens


@pytest.mark.parametrize(("parameters", "number_format"), [(5_000_000, "float32"), (600_000_000, "bfloat16")])
def test_versions_of_large_models_are_published_in_the_format_that_engines_compute_in(parameters, number_format):
    model = ModelFacts(parameters=parameters)
    assert GrpoSettings().for_model(model).weights.number_format == number_format
    given = GrpoSettings(weights=FullWeights(dtype="float32"))
    assert given.for_model(model).weights.number_format == "float32"


def test_what_is_given_is_never_chosen_again():
    given = GrpoSettings(max_tokens=3, learning_rate=0.5)
    fitted = given.for_model(ModelFacts(parameters=10**9))
    assert (fitted.max_tokens, fitted.learning_rate) == (3, 0.5)
    assert chosen(given, ModelFacts(parameters=5)) == []


def test_a_penalty_for_length_fits_the_length_that_is_chosen():
    given = GrpoSettings(overlong={"buffer_tokens": 100})
    assert given.for_model(ModelFacts(parameters=5)).scoring.overlong.buffer_tokens == 64
    assert given.for_model(ModelFacts(parameters=10**9)).scoring.overlong.buffer_tokens == 100


QWEN = ModelFacts(parameters=600_000_000, longest=40_960)
VLLM = VllmEngine(kind="vllm")


@pytest.mark.parametrize(
    ("settings", "model", "device", "doubt"),
    [
        (
            GrpoSettings(engine=VLLM, learning_rate=5e-4),
            QWEN,
            "cuda",
            "500 times the default for 600 M parameters (1e-06)",
        ),
        (GrpoSettings(engine=VLLM, learning_rate=1e-9), QWEN, "cuda", "may learn hardly anything"),
        (GrpoSettings(engine=VLLM, max_tokens=16), QWEN, "cuda", "are seldom this short"),
        (GrpoSettings(engine=VLLM, max_tokens=8192), QWEN, "cuda", "Raise token_budget"),
        (GrpoSettings(engine=VLLM, max_tokens=50_000, token_budget=60_000), QWEN, "cuda", "no room for a prompt"),
        (GrpoSettings(engine=VLLM, precision=Precision.FP32), QWEN, "cuda", "several times as fast"),
        (GrpoSettings(), QWEN, "cpu", 'use engine = { kind = "vllm" }'),
        (GrpoSettings(engine=VLLM, prompts_per_step=2, group_size=4), QWEN, "cuda", "has 2 rollouts"),
        (SftSettings(learning_rate=0.01), QWEN, "cpu", "500 times the default"),
    ],
)
def test_a_setting_that_seldom_works_with_such_a_model_is_doubted(settings, model, device, doubt):
    [found] = doubts(settings, model, device=device)
    assert doubt in found


@pytest.mark.parametrize("model", [QWEN, ModelFacts(parameters=2_000_000, longest=128), ModelFacts(parameters=0)])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo", "sft", "rejection"])
def test_the_defaults_are_never_doubted(algorithm, model):
    given = ALGORITHMS[algorithm].settings()
    assert list(doubts(given.model_copy(update={"engine": VLLM}), model, device="cuda")) == []


async def test_a_run_says_what_it_chose_and_what_it_doubts_before_it_begins(grpo_draft, carry_out, tiny_model):
    draft = with_settings(grpo_draft, learning_rate=0.5, warmup_steps=0, max_tokens="auto", steps=1)
    told = notices(await carry_out(draft))
    longest = model_facts(tiny_model, 0).longest
    assert any(text.startswith(f"max_tokens is {min(64, longest // 2)}: ") for text in told)
    [doubt] = [text for text in told if "times the default for" in text]
    assert told.index(doubt) < told.index("Starting the trainer and loading the model.")


def test_a_configuration_that_cannot_be_read_leaves_the_longest_sequence_unknown(tmp_path):
    assert model_facts(tmp_path, 7) == ModelFacts(parameters=7)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert model_facts(tmp_path, 7) == ModelFacts(parameters=7)
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 4096}}')
    assert model_facts(tmp_path, 7).longest == 4096
