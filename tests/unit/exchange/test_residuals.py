"""A reducer that goes on from a checkpoint does as if nothing had been; with other ranks, nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fulmen_exchange.layout import ParameterSpan
from fulmen_exchange.policies.state import PolicyStateInvalid
from fulmen_exchange.registry import load_codecs
from fulmen_exchange.residuals import ResidualsInvalid, assign, merge, split
from tests.support.exchange.aggregators import stored
from tests.support.exchange.thread_ranks import Rank, on_ranks

CODECS = sorted(load_codecs())
STATELESS = {"none", "bf16", "fp16", "qsgd"}
BEFORE, AFTER = 4, 4
"""Rounds before the checkpoint, and after it."""


def first(rank: Rank) -> tuple[dict[str, Any], list[Tensor]]:
    """Takes the first rounds; returns the state, and the sums of those and of more rounds."""
    sums = [rank.reduce(number) for number in range(1, BEFORE + 1)]
    state = stored(rank.reducer.state())
    return state, sums + [rank.reduce(number) for number in range(BEFORE + 1, BEFORE + AFTER + 1)]


def then(states: Sequence[dict[str, Any]]) -> Any:
    """Goes on from states."""

    def work(rank: Rank) -> list[Tensor]:
        rank.reducer.restore(states)
        return [rank.reduce(number) for number in range(BEFORE + 1, BEFORE + AFTER + 1)]

    return work


def settings_for(codec: str, **more: Any) -> dict[str, Any]:
    return {"ratio": 10.0, **more} if "ratio" in load_codecs()[codec].settings.model_fields else more


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_number_of_ranks_resumes_bit_for_bit(codec: str) -> None:
    given = settings_for(codec, full_sync_every=6)
    found = on_ranks(first, codec, world=2, **given)
    again = on_ranks(then([state for state, _ in found]), codec, world=2, **given)
    for (_, sums), resumed in zip(found, again, strict=True):
        for wanted, got in zip(sums[BEFORE:], resumed, strict=True):
            assert torch.equal(wanted.view(torch.int32), got.view(torch.int32))
    assert bool(found[0][0]["codecs"]) == (codec not in STATELESS), "what is kept is in the state"


@pytest.mark.parametrize("at", [23, 25, 28, 31])
def test_a_run_goes_on_from_within_a_window_without_compression(at: int) -> None:
    rounds, given = 33, {"ratio": 10.0, "policy": {"warmup_rounds": 5, "anomaly": {"window": 4, "times": 2}}}

    def reduced(rank: Rank, number: int) -> Tensor:
        return rank.reduce(number, scale=1.0 if number < 23 else 1e4)

    def straight(rank: Rank) -> tuple[dict[str, Any], list[Tensor], tuple[str, ...]]:
        for number in range(1, at + 1):
            reduced(rank, number)
        state = stored(rank.reducer.state())
        sums = [reduced(rank, number) for number in range(at + 1, rounds + 1)]
        return state, sums, rank.reducer.drain().events

    found = on_ranks(straight, "dgc", world=2, **given)
    assert any("compression off" in text for text in found[0][2])

    def resumed(rank: Rank) -> list[Tensor]:
        rank.reducer.restore([state for state, _, _ in found])
        return [reduced(rank, number) for number in range(at + 1, rounds + 1)]

    for (_, sums, _), again in zip(found, on_ranks(resumed, "dgc", world=2, **given), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(sums, again, strict=True))


def test_a_policy_that_watches_what_was_captured_goes_on_bit_for_bit() -> None:
    # Never in its band: every round has another ratio.
    policy = {"kind": "adaptive", "patience": 1, "low": 0.9, "high": 0.95, "increase": 0.01}
    given = {"policy": policy, "ratio": 20.0}
    found = on_ranks(first, "topk", world=2, **given)
    again = on_ranks(then([state for state, _ in found]), "topk", world=2, **given)
    for (_, sums), resumed in zip(found, again, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(sums[BEFORE:], resumed, strict=True))


# masked keeps back what is beyond its limit alone, for as many rounds as that takes.
@pytest.mark.parametrize("codec", sorted(set(CODECS) - STATELESS - {"masked"}))
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1), (1, 2)])
def test_with_another_number_of_ranks_all_that_was_kept_back_is_sent_in_the_end(
    codec: str, before: int, after: int
) -> None:
    # dgc without momentum, whose sums are those of the gradients.
    given = settings_for(codec, **({"momentum": 0.0, "clip": 1e9} if codec == "dgc" else {}))

    def work(rank: Rank) -> tuple[dict[str, Any], Tensor, Tensor]:
        sums = [rank.reduce(number) for number in (1, 2, 3)]
        return stored(rank.reducer.state()), sum(sums), sum(rank.plain_sum(number) for number in (1, 2, 3))

    found = on_ranks(work, codec, world=before, **given)
    states = [state for state, _, _ in found]
    _, sent, wanted = found[0]

    def rest(rank: Rank) -> Tensor:
        rank.reducer.restore(states)
        return rank.reduce(1, scale=0.0)  # a round that sends everything, with nothing new

    for got in on_ranks(rest, codec, world=after, full_sync_every=4, **given):
        # What is sent is rounded, by double_quantization by a hundredth.
        assert float((sent + got - wanted).norm() / wanted.norm()) < 0.02
        assert float((sent - wanted).norm() / wanted.norm()) > 0.03, "something was kept back"


def test_the_momentum_of_ranks_that_are_gone_goes_on() -> None:
    def total(states: Sequence[dict[str, Any]], name: str) -> Tensor:
        found = [one["states"]["0.weight"]["tensors"][name] for state in states for one in state["codecs"]]
        return torch.stack(found).sum(0)

    states = [state for state, _ in on_ranks(first, "dgc", world=3, ratio=10.0)]

    def work(rank: Rank) -> dict[str, Any]:
        rank.reducer.restore(states)
        return rank.reducer.state()

    again = on_ranks(work, "dgc", world=2, ratio=10.0)
    for name in ("velocity", "accumulated"):
        torch.testing.assert_close(total(states, name), total(again, name))


def test_states_come_in_any_order() -> None:
    found = on_ranks(first, "dgc", world=3, ratio=10.0)
    states = [state for state, _ in found]
    one, other = (on_ranks(then(each), "dgc", world=3, ratio=10.0) for each in (states, states[::-1]))
    for left, right in zip(one, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_another_layout_goes_on_from_the_same_state() -> None:
    # A matrix that was compressed is summed as it is now: its momentum goes on.
    states = [state for state, _ in on_ranks(first, "dgc", world=2, ratio=10.0)]

    def work(rank: Rank) -> dict[str, Any]:
        rank.reducer.restore(states)
        return rank.reducer.state()

    for before, after in zip(states, on_ranks(work, "dgc", world=2, ratio=10.0, dense=["2.*"]), strict=True):
        for one, other in zip(before["codecs"], after["codecs"], strict=True):
            for name, piece in one["states"].items():
                tensors = other["states"][name]["tensors"]
                assert all(torch.equal(tensor, tensors[key]) for key, tensor in piece["tensors"].items())


def test_without_states_everything_begins_anew() -> None:
    def work(rank: Rank) -> bool:
        wanted = [rank.reduce(number) for number in (1, 2)]
        rank.reducer.restore([])
        assert rank.reducer.rounds == 0
        return all(torch.equal(one, rank.reduce(number)) for number, one in enumerate(wanted, start=1))

    assert on_ranks(work, "dgc", world=2, ratio=10.0) == [True] * 2


def test_states_of_another_run_are_refused() -> None:
    [(state, _)] = on_ranks(first, "topk", world=1, ratio=10.0)
    entry = state["codecs"][0]
    of_nobody = {"begin": 0, "tensors": {"residual": torch.ones(3)}}
    damaged = [
        ({**state, "format": 7}, "another version"),
        ({**state, "codecs": [{**entry, "states": {"nobody.weight": of_nobody}}]}, "nobody.weight"),
        ({**state, "codecs": [{**entry, "states": {"0.weight": {**of_nobody, "begin": 11699}}}]}, "0.weight"),
        ({**state, "codecs": [{**entry, "codec": "gone"}]}, "gone"),
        (
            {**state, "codecs": [{**entry, "states": {"0.weight": {"begin": 0, "tensors": {"u": torch.ones(3)}}}}]},
            "u of",
        ),
    ]

    def work(rank: Rank) -> int:
        for bad, says in damaged:
            with pytest.raises(ResidualsInvalid, match=says):
                rank.reducer.restore([bad])
        with pytest.raises(PolicyStateInvalid):
            rank.reducer.restore([{**state, "policy": {}}])
        rank.reducer.restore([state])
        return rank.reducer.rounds

    assert on_ranks(work, "topk", world=1, ratio=10.0) == [BEFORE]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    ends=st.lists(st.integers(0, 40), max_size=4),
    others=st.lists(st.integers(0, 40), max_size=4),
    seed=st.integers(0, 100),
)
def test_what_was_cut_at_one_set_of_ends_can_be_laid_at_another(
    sizes: list[int], ends: list[int], others: list[int], seed: int
) -> None:
    places, total = [], 0
    for index, size in enumerate(sizes):
        places.append(ParameterSpan(name=f"p{index}", rows=size, columns=1, begin=total))
        total += size
    whole = torch.randn(total, generator=torch.Generator().manual_seed(seed))

    def parts(offsets: list[int]) -> list[tuple[int, int]]:
        at = sorted({0, total, *(min(end, total) for end in offsets)})
        return list(pairwise(at))

    pieces = [split(places, {"t": whole[left:right]}, begin=left) for left, right in parts(ends)]
    wholes = merge(pieces, {place.name: place.rows for place in places})
    found = torch.full((total,), float("nan"))
    for left, right in parts(others):
        assign(places, wholes, {"t": found[left:right]}, begin=left)
    assert torch.equal(found, whole)
