# ruff: noqa: N803, N806 (tensor names end with their shape)
"""Tokens train with the experts that sampled them: against a reference in numpy, in packing, and with bad records."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid
from fulmen_algorithm.engines.embedded.routing import RoutingTape
from fulmen_algorithm.training.compute import ComputeSettings
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.optimizer import OptimizerSettings
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.router_replay import ReplayUnsupported, RouterReplay, expert_blocks
from fulmen_algorithm.training.rows import row_from_completion
from fulmen_algorithm.training.settings import BatchSettings, PackingMode, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import train_batch
from fulmen_exchange.ranks import Ranks
from tests.support.algorithm.mixture import EXPERTS, LAYERS, TOP_K, mixture, mixture_folder

CPU = torch.device("cpu")


@pytest.fixture
def policy(tmp_path):
    return PolicyModel.load(mixture_folder(tmp_path / "mixture"))


def some_experts(tokens, seed=0, layers=LAYERS):
    """Draws experts of each token and layer, without repetition; int [T, L, K]."""
    rng = np.random.default_rng(seed)
    return np.array([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(layers)] for _ in range(tokens)])


def recorded(chosen_TLK, spans=None):
    tokens, layers, top_k = chosen_TLK.shape
    spans = ((0, tokens),) if spans is None else spans
    packed = b"".join(chosen_TLK[start:end].astype(np.uint8).tobytes() for start, end in spans)
    return RoutedExperts(layers=layers, top_k=top_k, entry_bytes=1, spans=spans, packed=packed)


def rows_of(lengths, experts=lambda index, length: recorded(some_experts(length, seed=index))):
    rng = np.random.default_rng(7)
    rows = []
    for index, length in enumerate(lengths):
        row = row_from_completion(
            rollout_id=f"rollout-{index}",
            prompt_ids=rng.integers(6, 25, 2).tolist(),
            completion_ids=rng.integers(6, 25, length - 2).tolist(),
            logprobs=[-1.0] * (length - 2),
            advantage=1.0 if index % 2 else -1.0,
            version=3,
        )
        rows.append(replace(row, routed_experts=experts(index, length)))
    return rows


def silu(x):
    return x / (1 + np.exp(-x))


def silu_slope(x):
    sigmoid = 1 / (1 + np.exp(-x))
    return sigmoid * (1 + x * (1 - sigmoid))


def reference(x_ND, router_ED, gate_up_EHD, down_EDH, chosen_NK, upstream_ND):
    """Computes a layer of given experts and, by hand, its gradients for the sum of `upstream * output`, in float64."""
    logits_NE = x_ND @ router_ED.T
    probs_NE = np.exp(logits_NE - logits_NE.max(-1, keepdims=True))
    probs_NE /= probs_NE.sum(-1, keepdims=True)
    outputs = np.zeros_like(x_ND)
    of_router, of_gate_up, of_down = np.zeros_like(router_ED), np.zeros_like(gate_up_EHD), np.zeros_like(down_EDH)
    for n, experts in enumerate(chosen_NK):
        shares = probs_NE[n, experts] / probs_NE[n, experts].sum()
        slopes = np.zeros(len(experts))
        for k, expert in enumerate(experts):
            gate, up = np.split(gate_up_EHD[expert] @ x_ND[n], 2)
            inner = silu(gate) * up
            result = down_EDH[expert] @ inner
            outputs[n] += shares[k] * result
            slopes[k] = upstream_ND[n] @ result
            of_down[expert] += shares[k] * np.outer(upstream_ND[n], inner)
            back = shares[k] * (down_EDH[expert].T @ upstream_ND[n])
            of_gate_up[expert] += np.outer(np.concatenate([back * up * silu_slope(gate), back * silu(gate)]), x_ND[n])
        # The shares are a softmax over the chosen logits alone.
        of_logits = shares * (slopes - shares @ slopes)
        for k, expert in enumerate(experts):
            of_router[expert] += of_logits[k] * x_ND[n]
    return outputs, of_router, of_gate_up, of_down


def test_a_replayed_layer_and_its_gradients_are_those_of_the_reference():
    model = mixture(scale=8.0).double()
    # The grouped products of the library know no float64.
    model.set_experts_implementation("eager")
    block = expert_blocks(model)[0]
    x_ND, upstream_ND = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 5, 32, dtype=torch.float64)
    chosen_TLK = some_experts(10)
    replay = RouterReplay(model)
    replay.use(torch.tensor(chosen_TLK, dtype=torch.int32).unflatten(0, (2, 5)), CPU)
    output = block.block(x_ND)
    (output * upstream_ND).sum().backward()

    weights = [
        w.detach().numpy() for w in (block.block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    ]
    flat = [t.reshape(10, 32).numpy() for t in (x_ND, upstream_ND)]
    outputs, *gradients = reference(flat[0], *weights, chosen_TLK[:, 0], flat[1])
    np.testing.assert_allclose(output.detach().reshape(10, 32).numpy(), outputs, atol=1e-6)
    found = (block.block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    for parameter, expected in zip(found, gradients, strict=True):
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(parameter.grad.numpy(), expected, atol=1e-6)


BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "granitemoe": {"num_local_experts": 8},
    "glm4_moe": {"n_routed_experts": 8, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8},
    "lfm2_moe": {"num_experts": 8, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "full_attention"]},
    "qwen3_next": {"num_experts": 8, "shared_expert_intermediate_size": 16},
    "deepseek_v3": {
        "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": None,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_given_experts_and_its_own_make_no_difference(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**BASE, **FAMILIES[family]})).eval()
    ids = torch.arange(10)[None]

    def passed(routed):
        replay.use(routed, CPU)
        tape.begin([0])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        (experts,) = tape.take()
        shape = (1, 10, experts.layers, experts.top_k)
        return logits, torch.frombuffer(bytearray(experts.packed), dtype=torch.uint8).view(shape).int()

    tape, replay = RoutingTape(model), RouterReplay(model)
    logits, own = passed(None)
    repeated, same = passed(own)
    assert torch.equal(same, own)
    assert torch.equal(repeated, logits)
    others, forced = passed((own + 1) % 8)
    assert torch.equal(forced, (own + 1) % 8)
    assert not torch.allclose(others, logits)
    # As vLLM reports them: of all layers, those without experts too.
    dense = torch.full((1, 10, 3, 2), 7, dtype=torch.int32)
    dense[:, :, [block.layer for block in expert_blocks(model)]] = own
    assert torch.equal(passed(dense)[0], logits)


def test_packed_rows_have_the_log_probabilities_of_rows_alone(policy):
    rows = rows_of((9, 5, 7, 4, 12))
    packed = logprobs_of(policy, rows, settings=StepSettings(token_budget=24))
    assert policy.packing(PackingMode.PACKED) is PackingMode.PACKED
    for row, found in zip(rows, packed, strict=True):
        (alone,) = logprobs_of(policy, [row], settings=StepSettings(packing=PackingMode.PADDED))
        np.testing.assert_allclose(found[1:], alone[1:], atol=1e-5)
    without = logprobs_of(policy, [replace(row, routed_experts=None) for row in rows], settings=StepSettings())
    assert (
        max(abs(a - b) for some, others in zip(packed, without, strict=True) for a, b in zip(some, others, strict=True))
        > 0.05
    )


def test_tokens_without_a_record_pass_the_trainers_own_experts(policy):
    chosen_TLK = some_experts(9)
    (partly,) = rows_of((9,), lambda *_: recorded(chosen_TLK, spans=((6, 9),)))
    (whole,) = rows_of((9,), lambda *_: recorded(chosen_TLK))
    (without,) = rows_of((9,), lambda *_: None)
    found, replayed, own = (logprobs_of(policy, [row], settings=StepSettings())[0] for row in (partly, whole, without))
    # The token at t is computed from those before it. Which others experts compute beside it changes last bits.
    np.testing.assert_allclose(found[1:7], own[1:7], atol=1e-5)
    assert np.abs(np.subtract(found[7:], own[7:])).max() > 1e-2
    assert np.abs(np.subtract(found[1:7], replayed[1:7])).max() > 1e-2
    # Nothing is left of a replay in later passes.
    assert logprobs_of(policy, [without], settings=StepSettings())[0] == own


def trained_weights(folder, *, checkpointing):
    policy = PolicyModel.load(folder)
    policy.prepare(ComputeSettings(gradient_checkpointing=checkpointing), Ranks(device=CPU))
    state = make_state(policy, OptimizerSettings(learning_rate=1e-2))
    # Several micro-batches: each is recomputed with its own experts.
    settings = StepSettings(token_budget=12)
    (result,) = train_batch(
        state, rows_of((9, 5, 7, 4, 12)), settings=settings, batch=BatchSettings(), seed=0, current_version=3
    )
    assert not result.skipped
    return {name: parameter.detach() for name, parameter in policy.model.named_parameters()}


def test_layers_that_are_recomputed_pass_the_same_experts(tmp_path):
    folder = mixture_folder(tmp_path / "mixture")
    stored, recomputed = (trained_weights(folder, checkpointing=flag) for flag in (False, True))
    for name, weights in stored.items():
        torch.testing.assert_close(recomputed[name], weights, atol=1e-6, rtol=1e-5, msg=name)


def test_the_share_of_tokens_with_other_experts_is_reported(policy):
    def own(index, length):
        tape = RoutingTape(policy.model)
        tape.begin([0])
        with torch.no_grad():
            policy.model(
                torch.tensor([rows_of((length,) * (index + 1), lambda *_: None)[index].token_ids]), use_cache=False
            )
        return tape.take()[0]

    def metrics(rows, minibatches):
        state = make_state(policy, OptimizerSettings(learning_rate=0.0))
        batch = BatchSettings(minibatches=minibatches, measure_mismatch=True)
        return train_batch(state, rows, settings=StepSettings(), batch=batch, seed=0, current_version=3)[0].metrics

    for minibatches in (1, 2):
        agreed = metrics(rows_of((9, 9), own), minibatches)
        assert agreed["router_mismatch_tokens_share"] == agreed["router_mismatch_choices_share"] == 0
        assert agreed["router_replayed_tokens_share"] == 1

        def one_differs(index, length):
            experts = own(index, length)
            chosen = np.frombuffer(experts.packed, dtype=np.uint8).reshape(length, LAYERS, TOP_K).copy()
            # The last layer of the last token: no other token depends on it.
            chosen[-1, -1] = [expert for expert in range(EXPERTS) if expert not in chosen[-1, -1]][:TOP_K]
            # In another order they are the same experts.
            chosen[0, 0] = chosen[0, 0][::-1]
            return recorded(chosen)

        differing = metrics(rows_of((9, 9), one_differs), minibatches)
        assert differing["router_mismatch_tokens_share"] == pytest.approx(1 / 9)
        assert differing["router_mismatch_choices_share"] == pytest.approx(1 / 18)
        assert "router_mismatch_tokens_share" not in metrics(rows_of((9, 9), lambda *_: None), minibatches)


@pytest.mark.parametrize(
    ("chosen_TLK", "problem"),
    [
        (some_experts(5, layers=1), "1 layers, the model 2 with experts"),
        (some_experts(5, layers=3), "3 layers, the model 2 with experts"),
        (some_experts(5)[:, :, :1], "1 experts per token and layer, the model 2"),
        (some_experts(5)[:, :1, :1], "1 layers, .*; 1 experts per token"),
        (some_experts(5) + 6, "the expert 13, the model 8"),
        (np.zeros((5, LAYERS, TOP_K), dtype=int), "an expert twice for one token"),
    ],
)
def test_experts_of_another_model_are_refused_with_every_problem(policy, chosen_TLK, problem):
    rows = rows_of((5,), lambda *_: recorded(chosen_TLK))
    with pytest.raises(RoutedExpertsInvalid, match=problem):
        logprobs_of(policy, rows, settings=StepSettings())


def test_rows_of_different_models_in_one_batch_are_refused(policy):
    rows = rows_of((5, 5), lambda index, length: recorded(some_experts(length, layers=1 + index)))
    with pytest.raises(RoutedExpertsInvalid, match="different models"):
        logprobs_of(policy, rows, settings=StepSettings())


def test_a_record_longer_than_its_row_is_refused():
    with pytest.raises(RoutedExpertsInvalid, match="experts of 6 tokens for 5"):
        rows_of((5,), lambda *_: recorded(some_experts(6)))


def test_a_model_without_experts_says_that_nothing_can_be_replayed(tmp_path):
    from tests.support.algorithm.models import small_model

    dense = PolicyModel.load(small_model(tmp_path / "dense"))
    with pytest.raises(ReplayUnsupported, match="not a mixture of experts"):
        logprobs_of(dense, rows_of((5,)), settings=StepSettings())


def test_a_model_that_chooses_otherwise_is_refused_instead_of_trained_with_other_experts():
    config = AutoConfig.for_model("phimoe", **{**BASE, "num_local_experts": 8})
    model = AutoModelForCausalLM.from_config(config).eval()
    replay = RouterReplay(model)
    replay.use(torch.tensor(some_experts(4, layers=3), dtype=torch.int32)[None], CPU)
    with pytest.raises(ReplayUnsupported, match="has no topk"):
        model(input_ids=torch.arange(4)[None], use_cache=False)
