"""States in bfloat16: half the memory, and what is rounded away is not lost on average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import Round
from tests.support.exchange.codec_cases import segment
from tests.support.exchange.thread_ranks import Rank, on_ranks

CODECS = ["topk", "topk_quantised", "dgc"]
SIZE = 50_000


@pytest.mark.parametrize(("codec", "bytes_each"), [("topk", 2), ("topk_quantised", 2), ("dgc", 4)])
def test_a_state_takes_so_many_bytes_for_each_parameter(codec: str, bytes_each: int) -> None:
    like = torch.zeros(SIZE)
    for residual, factor in (("float32", 2), ("bfloat16", 1)):
        made = segment(codec, residual=residual)
        state = made.new_state(like)
        made.encode(torch.randn(SIZE), state, [0, SIZE], Round(number=1, ratio=50.0))
        held = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        assert held == factor * bytes_each * SIZE


def test_rounding_at_random_has_no_bias_and_takes_a_neighbour() -> None:
    values = torch.randn(2000)
    total = torch.zeros(2000, dtype=torch.float64)
    out = torch.empty(2000, dtype=torch.bfloat16)
    draws = 4000
    for seed in range(draws):
        kernels.round_at_random(values, out, seed)
        total += out
        assert bool(((out.float() - values).abs() <= 2**-7 * values.abs()).all())
    # The spread of a mean of so many draws: at most half a step of bfloat16, over their root.
    spread = 2**-8 * values.double().abs() / draws**0.5
    assert bool(((total / draws - values).abs() <= 6 * spread).all())


def test_what_bfloat16_holds_stays_and_nothing_becomes_infinite() -> None:
    exact = torch.randn(1000).bfloat16()
    out = torch.empty_like(exact)
    kernels.round_at_random(exact.float(), out, 1)
    assert torch.equal(out, exact)
    largest = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 0.0, -0.0])
    out = torch.empty(4, dtype=torch.bfloat16)
    for seed in range(50):
        kernels.round_at_random(largest, out, seed)
        assert bool(out.isfinite().all())
        assert out[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("codec", CODECS)
def test_small_gradients_are_not_lost_in_large_residuals(codec: str) -> None:
    # Rounded to the nearest, 1 + 1/1000 stays 1 in bfloat16, however often.
    made = segment(codec, residual="bfloat16", **({"momentum": 0.0} if codec == "dgc" else {}))
    state = made.new_state(torch.zeros(SIZE))
    name = made.residual_name
    assert name is not None
    state[name].fill_(1.0)
    one = torch.zeros(SIZE)
    one[0] = 1e6  # what is sent
    for number in range(1, 101):
        made.encode(one + 1e-3, state, [0, SIZE], Round(number=number, ratio=4096.0))
    kept = state[name].float()
    assert float(kept[kept > 0.5].mean()) == pytest.approx(1.1, abs=0.02)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_sent_and_what_stays_are_what_there_was(codec: str) -> None:
    made = segment(codec, residual="bfloat16", **({"momentum": 0.0} if codec == "dgc" else {}))
    state, given, sent = made.new_state(torch.zeros(SIZE)), torch.zeros(SIZE), torch.zeros(SIZE)
    torch.manual_seed(3)
    for number in range(1, 21):
        gradient = torch.randn(SIZE)
        given += gradient
        for payload in made.encode(gradient, state, [0, SIZE], Round(number=number, ratio=20.0, flush=number == 20)):
            made.add(payload, sent)
    assert float((given - sent).norm() / given.norm()) < 0.02


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_that_comes_back_is_in_the_residual_again(codec: str) -> None:
    made = segment(codec, residual="bfloat16", **({"momentum": 0.0} if codec == "dgc" else {}))
    state, gradient = made.new_state(torch.zeros(SIZE)), torch.randn(SIZE)
    [payload] = made.encode(gradient.clone(), state, [0, SIZE], Round(number=1, ratio=50.0))
    made.credit(payload, state, 0)
    assert made.residual_name is not None
    torch.testing.assert_close(state[made.residual_name].float(), gradient, rtol=2**-6, atol=0)


@pytest.mark.parametrize("codec", CODECS)
def test_ranks_learn_as_with_float32_and_go_on_from_a_checkpoint_bit_for_bit(codec: str) -> None:
    def work(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rank.reduce(1)
        rank.reduce(2)
        states = rank.link.told(rank.reducer.state())
        later = [rank.reduce(number) for number in (3, 4)]
        rank.reducer.restore(states)  # weights are not changed by sums
        return later, [rank.reduce(number) for number in (3, 4)]

    more: dict[str, Any] = {"residual": "bfloat16"}
    found = on_ranks(work, codec, **more)
    for later, again in found:
        assert all(torch.equal(left, right) for left, right in zip(later, again, strict=True))
    losses = {kind: learnt(codec, kind) for kind in ("float32", "bfloat16")}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.15)


def learnt(codec: str, residual: str) -> float:
    """Trains a small regression with a quarter of a hundredth of its gradients; returns the mean of the last losses."""
    torch.manual_seed(1)
    target, model = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    made = segment(codec, residual=residual)
    parameters = list(model.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    state, losses = made.new_state(torch.zeros(size)), []
    rate = 0.02 if codec == "dgc" else 0.1
    for number in range(1, 401):
        rows = torch.randn(64, 64)
        loss = (model(rows) - target(rows)).square().mean()
        model.zero_grad()
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        out = torch.zeros(size)
        for payload in made.encode(flat, state, [0, size], Round(number=number, ratio=20.0)):
            made.add(payload, out)
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach() - rate * out, parameters)
        losses.append(loss.item())
    return sum(losses[-50:]) / 50
