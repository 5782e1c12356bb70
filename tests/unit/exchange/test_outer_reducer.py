"""Ranks that take steps of their own, and a reducer that brings their weights together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fulmen_exchange.outer import OuterStateInvalid
from fulmen_exchange.ranks import Ranks, StepInfo
from fulmen_exchange.registry import load_codecs
from tests.support.exchange.aggregators import stored
from tests.support.exchange.thread_ranks import Rank, on_ranks

RATE = 0.2
OUTER = {"kind": "outer", "steps": 3, "learning_rate": 1.0}
CODECS = sorted(name for name, entry in load_codecs().items() if not entry.settings.holds_momentum)


def flat(rank: Rank) -> Tensor:
    """Returns a copy of all weights."""
    return torch.cat([parameter.detach().flatten() for parameter in rank.parameters.values()])


def target_of(rank: Rank, number: int) -> Tensor:
    """Returns where the loss of a rank, |w - target|^2 / 2, is least."""
    return torch.randn(flat(rank).numel(), generator=torch.Generator().manual_seed(number))


def step(rank: Rank, *, skipped: bool = False) -> None:
    """Takes a step of SGD, as a run does."""
    parameters, weights = list(rank.parameters.values()), flat(rank)
    # Normalised over the rows of all ranks.
    gradient = (weights - target_of(rank, rank.number)) / rank.world
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()
    rank.reducer.reduce(parameters, Ranks(), StepInfo())
    if not skipped:
        for parameter in parameters:
            parameter.data -= RATE * parameter.grad  # type: ignore[operator]  # set above
    rank.reducer.on_step()


def steps(rank: Rank, number: int) -> None:
    for _ in range(number):
        step(rank)


def test_without_a_codec_the_weights_are_averaged_every_so_many_steps() -> None:
    def work(rank: Rank) -> tuple[Tensor, Tensor, Tensor]:
        start = flat(rank)
        steps(rank, 2)
        apart = flat(rank)
        step(rank)
        return start, apart, flat(rank)

    found = on_ranks(work, "none", world=3, outer=OUTER)
    targets = [torch.randn(one[0].numel(), generator=torch.Generator().manual_seed(n)) for n, one in enumerate(found)]
    for (start, apart, together), target in zip(found, targets, strict=True):
        # A rank's own gradient is as large as the sum would be.
        torch.testing.assert_close(apart, target + (start - target) * (1 - RATE) ** 2)
        mean = torch.stack([target + (start - target) * (1 - RATE) ** 3 for target in targets]).mean(0)
        torch.testing.assert_close(together, mean)
        assert torch.equal(together, found[0][2])


@pytest.mark.parametrize("codec", CODECS)
def test_all_ranks_have_the_same_bits_after_every_outer_step_and_come_near_the_minimum(codec: str) -> None:
    def work(rank: Rank) -> tuple[list[Tensor], Tensor]:
        found = []
        for _ in range(20):
            steps(rank, 3)
            found.append(flat(rank))
        return found, torch.stack([target_of(rank, number) for number in range(rank.world)]).mean(0)

    # So that what is kept back goes in a few rounds.
    mild = {"ratio": 4.0, "matrix_rank": 16}
    settings = {name: mild[name] for name in mild.keys() & load_codecs()[codec].settings.model_fields.keys()}
    outer = {**OUTER, "learning_rate": 0.5}
    [(first, minimum), *others] = on_ranks(work, codec, world=3, outer=outer, check_every=1, **settings)
    for other, _ in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    assert float((first[-1] - minimum).norm()) < 0.25 * float((first[0] - minimum).norm())


def test_weights_that_are_asked_for_are_the_same_on_all_ranks_at_any_time() -> None:
    def work(rank: Rank) -> tuple[Tensor, Tensor, int]:
        steps(rank, 4)
        rank.reducer.synchronize()
        settled, rounds = flat(rank), rank.reducer.rounds
        rank.reducer.synchronize()
        assert rank.reducer.rounds == rounds, "nothing has moved since"
        assert torch.equal(settled, flat(rank))
        steps(rank, 2)
        before = rank.reducer.rounds
        step(rank)
        return settled, flat(rank), rank.reducer.rounds - before

    [(settled, later, rounds), *others] = on_ranks(work, "topk", world=2, outer=OUTER, ratio=4.0)
    assert rounds == 1, "steps count from the last outer step"
    for one, two, _ in others:
        assert torch.equal(settled, one)
        assert torch.equal(later, two)


def test_settling_every_step_is_nothing_without_an_outer_loop() -> None:
    def work(rank: Rank) -> int:
        rank.reduce(1)
        rank.reducer.synchronize()
        return rank.reducer.rounds

    assert on_ranks(work, "none", world=2) == [1, 1]


def test_a_step_that_all_ranks_skip_counts() -> None:
    def work(rank: Rank) -> int:
        for _ in range(3):
            step(rank, skipped=True)
        return rank.reducer.rounds

    assert on_ranks(work, "none", world=2, outer=OUTER) == [1, 1]


def test_weights_that_are_not_finite_on_a_rank_are_left_behind_by_all() -> None:
    def work(rank: Rank) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        steps(rank, 3)
        before = flat(rank)
        steps(rank, 2)
        if rank.number == 1:
            rank.parameters["0.weight"].data[0, 0] = float("nan")
        rank.reducer.synchronize()
        after = flat(rank)
        steps(rank, 3)
        assert bool(flat(rank).isfinite().all())
        return before, after, rank.reducer.drain().events

    for before, after, events in on_ranks(work, "topk", world=2, outer=OUTER, ratio=4.0):
        assert torch.equal(before, after)
        assert any("not finite" in text for text in events)


@pytest.mark.parametrize("codec", ["none", "topk", "qsgd", "powersgd"])
@pytest.mark.parametrize(("at", "settles"), [(3, True), (4, True), (4, False)])
def test_a_run_goes_on_bit_for_bit(codec: str, at: int, settles: bool) -> None:
    given: dict[str, Any] = {"outer": {**OUTER, "momentum": 0.9, "decay": 0.5}}

    def first(rank: Rank) -> tuple[dict[str, Any], Tensor, Tensor]:
        steps(rank, at)
        if settles:
            rank.reducer.synchronize()
        state, weights = stored(rank.reducer.state()), flat(rank)
        steps(rank, 5)
        return state, weights, flat(rank)

    found = on_ranks(first, codec, world=2, **given)
    slices = found[0][0]["outer"]["slices"].values()
    anchored = any("anchor" in one["tensors"] for one in slices)
    assert anchored == (not settles), "an anchor is stored where the weights are elsewhere"

    def then(rank: Rank) -> Tensor:
        parameters = list(rank.parameters.values())
        for parameter, part in zip(
            parameters, found[rank.number][1].split([p.numel() for p in parameters]), strict=True
        ):
            parameter.data.copy_(part.view_as(parameter))
        rank.reducer.restore([state for state, _, _ in found])
        steps(rank, 5)
        return flat(rank)

    for (_, _, wanted), got in zip(found, on_ranks(then, codec, world=2, **given), strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.long(short=True)
def test_a_network_learns_with_the_defaults_at_a_high_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.exchange.thread_ranks.model_of", lambda _: network(0))
    teacher = network(1)

    def work(rank: Rank) -> list[float]:
        student = network(0)  # whose own weights are not used
        optimizer = torch.optim.AdamW(rank.parameters.values(), lr=3e-3)
        losses = []
        for number in range(300):
            inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(2 * number + rank.number))
            found = torch.func.functional_call(student, dict(rank.parameters), inputs)
            loss = (found - teacher(inputs).detach()).square().mean()
            # Normalised over the rows of all ranks.
            (loss / rank.world).backward()
            rank.reducer.reduce(list(rank.parameters.values()), Ranks(), StepInfo())
            optimizer.step()
            optimizer.zero_grad()
            rank.reducer.on_step()
            losses.append(float(loss.detach()))
        return losses

    outer = {"kind": "outer", "steps": 10}
    for losses in on_ranks(work, "topk", world=2, ratio=100.0, dense_below=1, outer=outer):
        last = sum(losses[-30:]) / 30
        assert last < 0.5 * sum(losses[:10]) / 10
        # Nothing builds up: it is not above what it has been at any time for long.
        assert last < 1.5 * min(sum(losses[at : at + 30]) / 30 for at in range(0, 270, 10))


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 96), torch.nn.Tanh(), torch.nn.Linear(96, 96), torch.nn.Tanh(), torch.nn.Linear(96, 4)
    )


def test_without_states_the_loop_begins_anew_from_the_weights_that_there_are() -> None:
    def work(rank: Rank) -> Tensor:
        steps(rank, 4)
        for parameter in rank.parameters.values():
            parameter.data.fill_(0.5)  # of another checkpoint
        rank.reducer.restore([])
        rank.reducer.synchronize()
        return flat(rank)

    for weights in on_ranks(work, "topk", world=2, outer=OUTER):
        assert bool((weights == 0.5).all())


def test_the_state_of_another_loop_is_refused() -> None:
    def state(rank: Rank) -> dict[str, Any]:
        return rank.reducer.state()

    states = on_ranks(state, "none", world=1, outer={**OUTER, "momentum": 0.9})

    def work(rank: Rank) -> bool:
        with pytest.raises(OuterStateInvalid):
            rank.reducer.restore(states)
        return True

    assert on_ranks(work, "none", world=1, outer=OUTER) == [True]
