import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fulmen_algorithm.training import scorer
from fulmen_algorithm.training.compute import ComputeSettings, Precision
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.packing import plan
from fulmen_algorithm.training.parallel import RankSpeeds, last_end_s, layouts_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import NO_VERSION, Row
from fulmen_algorithm.training.settings import OptimizerSettings, PackingMode, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import train_step
from fulmen_exchange.ranks import Ranks

OPTIMIZER = OptimizerSettings(learning_rate=1e-3)


def row_of(length: int) -> Row:
    return Row(
        rollout_id="a",
        token_ids=(1,) * length,
        loss_mask=(False,) * length,
        old_logprobs=(0.0,) * length,
        advantages=(0.0,) * length,
        policy_versions=(NO_VERSION,) * length,
    )


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths, st.integers(60, 300), st.integers(1, 5), st.sampled_from(PackingMode))
def test_ranks_share_all_rows_within_the_budget(lengths, budget, world, mode):
    rows = [row_of(length) for length in lengths]
    shares = layouts_of(rows, Ranks(world_size=world), token_budget=budget, mode=mode)
    layouts = [layout for share in shares for layout in share]
    assert sorted(i for layout in layouts for line in layout.lines for i in line) == list(range(len(rows)))
    for layout in layouts:
        assert layout.size_tokens <= budget
        assert all(sum(lengths[i] for i in line) <= layout.width for line in layout.lines)


@given(lengths, st.integers(60, 300), st.integers(2, 4))
def test_no_rank_has_more_than_a_micro_batch_more_than_another(lengths, budget, world):
    shares = layouts_of(
        [row_of(length) for length in lengths],
        Ranks(world_size=world),
        token_budget=budget,
        mode=PackingMode.PACKED,
    )
    loads = [sum(layout.size_tokens for layout in share) for share in shares]
    largest = max(layout.size_tokens for share in shares for layout in share)
    assert max(loads) - min(loads) <= largest


speeds_of_ranks = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(lengths, st.integers(60, 300), speeds_of_ranks, st.sampled_from(PackingMode))
def test_by_speed_the_last_rank_ends_no_later_than_by_positions_and_every_row_is_dealt_once(
    lengths, budget, speeds, mode
):
    rows, ranks = [row_of(length) for length in lengths], Ranks(world_size=len(speeds))
    alike = layouts_of(rows, ranks, token_budget=budget, mode=mode)
    shares = layouts_of(rows, ranks, token_budget=budget, mode=mode, speeds=speeds)
    dealt = [layout for share in shares for layout in share]
    assert sorted(i for layout in dealt for line in layout.lines for i in line) == list(range(len(rows)))
    assert all(layout.size_tokens <= budget for layout in dealt)
    end_s = last_end_s(shares, speeds)
    assert end_s <= last_end_s(alike, speeds)
    # When the rank that ends last took its last micro-batch, no other would have ended with it earlier.
    sizes = [layout.size_tokens for share in alike for layout in share]
    assert end_s <= (sum(sizes) + (len(speeds) - 1) * max(sizes)) / sum(speeds) * (1 + 1e-9)


def test_a_rank_that_is_three_times_slower_gets_a_third():
    rows = [row_of(10) for _ in range(16)]
    shares = layouts_of(rows, Ranks(world_size=2), token_budget=8192, mode=PackingMode.PACKED, speeds=[300.0, 100.0])
    assert [sum(layout.size_tokens for layout in share) for share in shares] == [120, 40]


def test_speeds_are_measured_of_copies_and_a_rank_without_rows_comes_closer_to_the_mean():
    speeds = RankSpeeds(ranks_per_copy=2)
    assert speeds.by_rank == ()
    speeds.note([0, 0, 0, 0], [1.0, 1.0, 1.0, 1.0])
    assert speeds.by_rank == ()
    speeds.note([100, 100, 50, 50], [0.5, 1.0, 1.0, 0.9])
    assert speeds.by_rank == (100.0, 100.0, 50.0, 50.0)
    speeds.note([200, 200, 0, 0], [1.0, 1.0, 0.1, 0.1])
    assert speeds.by_rank == pytest.approx((150.0, 150.0, 65.0, 65.0))


def test_rows_of_a_step_occupy_every_rank():
    shares = layouts_of(
        [row_of(10) for _ in range(16)], Ranks(world_size=4), token_budget=8192, mode=PackingMode.PACKED
    )
    assert [sum(layout.size_tokens for layout in share) for share in shares] == [40, 40, 40, 40]


def test_packing_saves_positions_where_rows_differ_in_length():
    rows = [row_of(length) for length in (60, 40, 30, 25, 20, 15, 10, 5)]
    packed, padded = [
        sum(layout.size_tokens for layout in plan(rows, token_budget=240, mode=mode))
        for mode in (PackingMode.PACKED, PackingMode.PADDED)
    ]
    assert packed == 240
    assert padded > packed


def step_of(model_dir, rows, compute=None):
    policy = PolicyModel.load(model_dir)
    policy.prepare(compute or ComputeSettings(), Ranks())
    state = make_state(policy, OPTIMIZER)
    return train_step(state, rows, settings=StepSettings(token_budget=64), current_version=2), state


def test_logits_in_pieces_give_the_same_step(model_dir, rows, monkeypatch):
    whole, _ = step_of(model_dir, rows)
    # Three positions at once, of a vocabulary of 26.
    monkeypatch.setattr(scorer, "LOGITS_AT_ONCE", 80)
    pieces, _ = step_of(model_dir, rows)
    assert pieces.loss == pytest.approx(whole.loss, abs=1e-6)
    assert pieces.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)


def test_gradient_checkpointing_gives_the_same_step_and_computes_layers_again(model_dir, rows):
    plain, _ = step_of(model_dir, rows)
    again, state = step_of(model_dir, rows, ComputeSettings(gradient_checkpointing=True))
    assert again.loss == pytest.approx(plain.loss, abs=1e-6)
    assert again.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    layer = scorer.layers_of(state.policy.model)[0]
    layer.input_layernorm.register_forward_hook(count)
    train_step(state, rows[:1], settings=StepSettings())
    assert passes == 2


def test_bf16_keeps_weights_moments_and_logprobs_in_float32(model_dir, rows):
    exact, _ = step_of(model_dir, rows)
    rounded, state = step_of(model_dir, rows, ComputeSettings(precision=Precision.BF16))
    assert rounded.loss == pytest.approx(exact.loss, abs=0.02)
    assert rounded.loss != exact.loss
    assert {p.dtype for p in state.policy.model.parameters()} == {torch.float32}
    moments = {m.dtype for values in state.optimizer.state.values() for m in values.values()}
    assert moments == {torch.float32}


def test_only_what_trains_is_asked_of_the_head(model_dir, rows):
    policy = PolicyModel.load(model_dir)
    positions = []
    _, head = scorer.parts_of(policy.model)
    head.register_forward_hook(lambda module, inputs, output: positions.append(len(output)))
    train_step(make_state(policy, OPTIMIZER), rows, settings=StepSettings())
    assert sum(positions) == sum(row.trained_tokens for row in rows)


SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 64}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
WIDE = SHAPE | {"hidden_size": 64, "head_dim": 32}


@pytest.mark.parametrize(
    ("model", "packs", "plain_head"),
    [
        (lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=7.0)), True, False),
        (lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])), False, True),
        # A fresh model's logits are far below the cap, which changes them by less than rounding.
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)), True, False),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=None)), True, True),
        (lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.0625)), True, False),
        (lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=1.0)), True, True),
        # Tokens are computed by experts in groups, and so to other last bits when their neighbours are others.
        (lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**WIDE, **EXPERTS)), True, True),
        (
            lambda: Lfm2MoeForCausalLM(
                Lfm2MoeConfig(**SHAPE, **EXPERTS, num_dense_layers=1, layer_types=["conv", "full_attention"])
            ),
            False,
            True,
        ),
    ],
    ids=[
        "logits that are scaled",
        "convolutions over the line",
        "a soft cap of logits",
        "a soft cap that is not set",
        "a scale of logits",
        "a scale of one",
        "experts",
        "experts and convolutions over the line",
    ],
)
def test_what_does_not_hold_for_a_model_is_found_out(policy, rows, model, packs, plain_head):
    torch.manual_seed(0)
    other = PolicyModel(model(), policy.tokenizer)
    assert scorer.try_out(other.model) == scorer.ModelTraits(plain_head=plain_head, packs=packs)
    # Whatever it is like, a row's log-probabilities are those that the model itself gives it alone.
    found = logprobs_of(other, rows, settings=StepSettings(token_budget=64))
    for row, values in zip(rows, found, strict=True):
        ids = torch.tensor([row.token_ids])
        with torch.no_grad():
            logprobs = other.model(ids, use_cache=False).logits.log_softmax(-1)
        expected = [float(logprobs[0, t - 1, row.token_ids[t]]) for t in range(1, len(row.token_ids))]
        assert values[1:] == pytest.approx(expected, abs=1e-4)
        assert all(math.isfinite(value) for value in values)


def test_what_follows_the_head_is_found_out_whatever_the_configuration_calls_it(policy):
    class Capped(LlamaForCausalLM):
        def forward(self, **inputs):
            answer = super().forward(**inputs)
            answer.logits = 30.0 * torch.tanh(answer.logits / 30.0)
            return answer

    torch.manual_seed(0)
    assert not scorer.try_out(PolicyModel(Capped(LlamaConfig(**SHAPE)), policy.tokenizer).model).plain_head
    assert scorer.try_out(PolicyModel(LlamaForCausalLM(LlamaConfig(**SHAPE)), policy.tokenizer).model).plain_head


def test_trying_a_model_out_leaves_no_hook_behind(policy):
    before = [len(module._forward_hooks) for module in policy.model.modules()]
    scorer.try_out(policy.model)
    assert [len(module._forward_hooks) for module in policy.model.modules()] == before
