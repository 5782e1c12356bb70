"""What is not finite, or would not be when it is summed, never stays in the state of a rank or a shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fulmen_exchange.registry import load_codecs
from tests.support.exchange.thread_ranks import Rank, on_ranks

CODECS = sorted(load_codecs())
HUGE = ["nan", "inf", "-inf", "the largest float32", "1e17"]


def tensors_in(state: Any) -> Iterator[Tensor]:
    """Yields all tensors of a nested state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_in(value)


def huge(gradient: Tensor, what: str) -> Tensor:
    """Puts what is huge into a gradient: into one element, or all of it."""
    if what == "1e17":
        return gradient * (1e17 / gradient.norm().clamp(min=1e-9) / 4)
    gradient = gradient.clone()
    gradient.view(-1)[0] = torch.finfo(torch.float32).max if what.startswith("the") else float(what)
    return gradient


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("what", HUGE)
def test_states_stay_finite_and_later_rounds_are_sums(codec: str, what: str) -> None:
    def work(rank: Rank) -> tuple[bool, Tensor]:
        rank.reduce(1)
        for _ in range(3):
            for parameter, gradient in zip(rank.parameters.values(), rank.gradients(2), strict=True):
                parameter.grad = huge(gradient, what) if not rank.number else gradient
            rank.reduced()
        later = torch.stack([rank.reduce(number) for number in (3, 4)])
        finite = all(
            bool(each.isfinite().all()) for each in tensors_in(rank.reducer.state()) if each.is_floating_point()
        )
        return finite, later

    more: dict[str, Any] = {"clip": 0.0} if codec == "dgc" else {}
    found = on_ranks(work, codec, **more)
    assert all(finite for finite, _ in found)
    assert all(bool(later.isfinite().all()) for _, later in found)


@pytest.mark.parametrize("codec", [name for name in CODECS if load_codecs()[name].settings.has_residual])
def test_a_stored_state_that_is_not_finite_is_restored_as_zeros(codec: str) -> None:
    def work(rank: Rank) -> tuple[bool, Tensor]:
        rank.reduce(1)
        state = rank.reducer.state()
        for tensor in tensors_in(state["codecs"]):
            tensor.view(-1)[0] = float("nan")
        rank.reducer.restore(rank.link.told(state))
        later = torch.stack([rank.reduce(number) for number in (2, 3)])
        return all(bool(each.isfinite().all()) for each in tensors_in(rank.reducer.state()["codecs"])), later

    for finite, later in on_ranks(work, codec):
        assert finite
        assert bool(later.isfinite().all())
