"""What holds of every policy, whatever happens: played through histories that a seed draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_exchange.policies.state import PolicyStateInvalid
from tests.support.exchange.policy_world import POLICIES, calm, history, play, policy_of, stored, with_norm

ROUNDS = 150
kinds = st.sampled_from(sorted(POLICIES))
seeds = st.integers(0, 10_000)
few = settings(deadline=None, max_examples=12)


@few
@given(kind=kinds, seed=seeds)
def test_every_rank_that_is_told_the_same_decides_the_same(kind, seed):
    stats = history(seed, ROUNDS)
    assert play(policy_of(kind), stats) == play(policy_of(kind), stats)


@few
@given(kind=kinds, seed=seeds, at=st.integers(1, ROUNDS - 1))
def test_a_policy_goes_on_from_a_stored_state_as_if_nothing_had_been(kind, seed, at):
    stats = history(seed, ROUNDS)
    throughout, before, after = policy_of(kind), policy_of(kind), policy_of(kind)
    play(before, stats[:at])
    after.restore(stored(before))
    assert play(after, stats[at:]) == play(throughout, stats)[at:]
    assert stored(after) == stored(throughout)


@few
@given(kind=kinds, seed=seeds)
def test_ratios_stay_within_their_bounds(kind, seed):
    low, high = {
        "fixed": (4, 100), "stages": (4, 150), "adaptive": (4, 1000), "auto": (4, 200)
    }[kind]  # fmt: skip
    decisions = play(policy_of(kind), history(seed, ROUNDS))
    assert all(low <= one.ratio <= high for one in decisions if one.choice.ratio is not None)
    assert all(one.ratio == 1.0 for one in decisions if one.choice.ratio is None)


@few
@given(kind=kinds, seed=seeds)
def test_all_that_was_kept_back_is_sent_before_compression_ends_or_its_codec_changes(kind, seed):
    stats = history(seed, ROUNDS)
    decisions = play(policy_of(kind), stats)
    # A round that is skipped sends nothing: the one before it is what the next one follows.
    sent = [one for one in decisions if "not finite" not in one.reason]
    for before, after in pairwise(sent):
        ends = before.enabled and not after.enabled
        changes = before.enabled and before.choice.has_residual and before.choice.key != after.choice.key
        if ends or changes:
            assert before.flush


@few
@given(kind=kinds, seed=seeds)
def test_every_change_of_what_is_sent_is_told_in_the_history(kind, seed):
    decisions = play(policy_of(kind), history(seed, ROUNDS))
    for before, after in pairwise(decisions):
        changed = before.enabled != after.enabled or (
            after.enabled and before.choice != after.choice and before.enabled
        )
        assert bool(after.events) or not changed


@few
@given(seed=seeds)
def test_settings_are_rolled_back_once_in_a_cool_down(seed):
    decisions = play(policy_of("stages"), history(seed, ROUNDS))
    at = [number for number, one in enumerate(decisions) if any("rolled back from" in text for text in one.events)]
    assert all(right - left >= 9 * 2**times for times, (left, right) in enumerate(pairwise(at)))


@pytest.mark.parametrize("kind", ["fixed", "stages", "adaptive"])
def test_compression_is_off_for_a_window_after_gradients_that_explode_and_then_cools_down(kind):
    policy = policy_of(kind, full_sync_every=0)
    play(policy, [calm(number, gradient_norms=(1.0,)) for number in range(1, 31)])
    decisions = play(policy, [with_norm(calm(number), 1e3) for number in range(31, 46)])
    assert [one.enabled for one in decisions] == [True, True] + [False] * 5 + [True] * 8
    # The last one ends the cool-down.
    assert [one.flush for one in decisions] == [False, True] + [False] * 12 + [True]
    assert "explode" in decisions[2].events[-1]
    assert "on again" in decisions[7].events[-1]


def test_what_is_sent_as_it_is_is_not_switched_off():
    # Nothing was measured yet, so that `auto` sends in its first choice: none.
    policy = policy_of("auto", full_sync_every=0)
    play(policy, [calm(number, gradient_norms=(1.0,)) for number in range(1, 31)])
    decisions = play(policy, [with_norm(calm(number), 1e3) for number in range(31, 46)])
    assert {(one.choice.codec, one.enabled, one.events) for one in decisions} == {("none", True, ())}


@pytest.mark.parametrize("zeros", [1, 70])
def test_norms_of_zero_say_nothing_of_what_is_out_of_the_ordinary(zeros):
    policy = policy_of("fixed", full_sync_every=0)
    play(policy, [calm(number) for number in range(1, 31)])
    quiet = play(policy, [with_norm(calm(number), 0.0) for number in range(31, 31 + zeros)])
    after = play(policy, [calm(number) for number in range(31 + zeros, 41 + zeros)])
    assert all(one.enabled and not one.flush for one in (*quiet, *after))
    loud = play(policy, [with_norm(calm(number), 1e3) for number in range(41 + zeros, 44 + zeros)])
    assert not loud[-1].enabled, "an explosion is still told from what is ordinary"


@pytest.mark.parametrize(
    ("norms", "enabled"),
    [
        ([(1e-4,)] * 3, [True, True, False]),
        ([(1.0, 1e3)] * 3, [True, True, False]),
        ([(1e3,), (0.0,), (1e3,), (1e3,)], [True, True, True, False]),
        ([(1e6,), (1.0,), (1e-9,), (1e6,), (1.0,)], [True] * 5),
    ],
    ids=["vanishing", "one rank of two explodes", "a zero within a streak", "single outliers"],
)
def test_anomalies_in_a_row_suspend_compression(norms: list[tuple[float, ...]], enabled: list[bool]) -> None:
    policy = policy_of("fixed", full_sync_every=0)
    play(policy, [calm(number) for number in range(1, 31)])
    decisions = play(policy, [calm(number, gradient_norms=each) for number, each in enumerate(norms, start=31)])
    assert [one.enabled for one in decisions] == enabled
    assert any(one.flush for one in decisions) == (not all(enabled))


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_a_round_without_finite_gradients_changes_nothing(kind):
    policy, other = policy_of(kind), policy_of(kind)
    for number in range(1, 40):
        skipped = policy.decide(calm(number, gradient_norms=(1.0, float("inf"))))
        assert "not finite" in skipped.reason
        assert not skipped.flush
        again, plain = policy.decide(calm(number)), other.decide(calm(number))
        assert replace(again, reason="", events=()) == replace(plain, reason="", events=())


def test_after_a_round_without_finite_gradients_everything_is_sent_again_before_compression_ends():
    # Norms may overflow where the gradients do not: the round was not skipped then, and something kept back.
    policy = policy_of("fixed", full_sync_every=0)
    play(policy, [calm(number) for number in range(1, 31)])
    stats = [with_norm(calm(number), norm) for number, norm in ((31, 1e4), (32, 1e4), (33, float("inf")), (33, 1e4))]
    decisions = play(policy, [*stats, with_norm(calm(34), 1e4)])
    assert [one.flush for one in decisions] == [False, True, False, True, False]
    assert [one.enabled for one in decisions] == [True, True, True, True, False]


def test_what_a_flush_captures_does_not_move_the_density():
    policy = policy_of("adaptive", full_sync_every=1)
    ratios = {one.ratio for one in play(policy, [calm(number, captured=1.0) for number in range(1, 60)])[8:]}
    assert ratios == {100.0}


def test_everything_is_sent_every_so_many_rounds():
    decisions = play(policy_of("fixed", full_sync_every=13), [calm(number) for number in range(1, 40)])
    assert [number for number, one in enumerate(decisions, start=1) if one.flush] == [13, 26, 39]


@pytest.mark.parametrize("damage", [{}, {"last": {}}, {"chooser": {"unknown": 1}}, {"anomaly": {"logs": "much"}}])
def test_a_state_of_something_else_is_refused(damage):
    policy = policy_of("adaptive")
    plain = {**stored(policy), **damage} if damage else {}
    if damage == {"last": {}}:
        plain.pop("rollback")
    with pytest.raises(PolicyStateInvalid):
        policy.restore(plain)


def test_a_state_of_another_kind_is_refused():
    with pytest.raises(PolicyStateInvalid, match="density"):
        policy_of("fixed").restore(stored(policy_of("adaptive")))
