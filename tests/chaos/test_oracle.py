"""The oracle of the chaos tests finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fulmen.store.v1 import attempt_pb2, failure_pb2, reward_pb2, rollout_pb2
from tests.support.chaos.oracle import Books, problems_of

CALLS = 2
LEAST = 0.1


def attempt(name: str, number: int, *, kind: int = 0, rewards: tuple[float, ...] = ()) -> attempt_pb2.Attempt:
    return attempt_pb2.Attempt(
        name=f"{name}/attempts/{number}",
        state=attempt_pb2.ATTEMPT_STATE_FAILED if kind else attempt_pb2.ATTEMPT_STATE_SUCCEEDED,
        failure_kind=kind,
        final=not kind,
        rewards=[reward_pb2.Reward(value=value) for value in rewards],
    )


def rollout(name: str, group: int) -> rollout_pb2.Rollout:
    lost = attempt(name, 1, kind=failure_pb2.FAILURE_KIND_LEASE_LOST)
    return rollout_pb2.Rollout(
        name=name,
        group_id=f"train/{group}",
        group_size=2,
        state=rollout_pb2.ROLLOUT_STATE_SUCCEEDED,
        attempts=[lost, attempt(name, 2, rewards=(0.5,))],
    )


def sound() -> Books:
    """Returns books without fault: two groups of two, both consumed, one trained on."""
    names = [
        ["projects/default/rollouts/a", "projects/default/rollouts/b"],
        ["projects/default/rollouts/c", "projects/default/rollouts/d"],
    ]
    return Books(
        rollouts=[rollout(name, group) for group, members in enumerate(names) for name in members],
        feed=[(f"train/{group}", tuple(members)) for group, members in enumerate(names)],
        consumed=[
            {"step": 1, "group": 0, "rollouts": names[0], "trained": names[0]},
            {"step": 2, "group": 1, "rollouts": names[1], "trained": []},
        ],
        calls={name: CALLS for members in names for name in members},
        rows={name: 1 for members in names for name in members},
    )


def with_first(change: Callable[[rollout_pb2.Rollout], object]) -> Books:
    books = sound()
    change(books.rollouts[0])
    return books


def test_sound_books_have_no_problem() -> None:
    assert problems_of(sound(), calls_per_rollout=CALLS, min_reward=LEAST) == []


@pytest.mark.parametrize(
    ("books", "says"),
    [
        (
            with_first(lambda each: setattr(each, "state", rollout_pb2.ROLLOUT_STATE_RUNNING)),
            "is ROLLOUT_STATE_RUNNING",
        ),
        (with_first(lambda each: each.attempts.pop(0)), "not dense"),
        (with_first(lambda each: setattr(each.attempts[0], "final", True)), "2 of 2 attempts are final"),
        (with_first(lambda each: setattr(each.attempts[1], "final", False)), "0 of 2 attempts are final"),
        (with_first(lambda each: setattr(each.attempts[1].rewards[0], "value", 0.0)), "rewards of its deciding"),
        (with_first(lambda each: each.attempts[0].rewards.add(value=0.0)), "was scored [0.0]"),
        (
            with_first(lambda each: setattr(each.attempts[0], "failure_kind", failure_pb2.FAILURE_KIND_AGENT_ERROR)),
            "ended as FAILURE_KIND_AGENT_ERROR",
        ),
        (replace(sound(), feed=sound().feed[:1]), "in the feed"),
        (replace(sound(), feed=[*sound().feed, sound().feed[0]]), "the feed has train/0 2 times"),
        (replace(sound(), rollouts=sound().rollouts[:3]), "has 1 of 2 rollouts"),
        (replace(sound(), rollouts=sound().rollouts[2:], feed=sound().feed[1:]), "have gaps"),
        (replace(sound(), consumed=sound().consumed[1:]), "not the beginning of the feed"),
        (
            replace(sound(), consumed=[*sound().consumed, sound().consumed[0]]),
            "projects/default/rollouts/a was trained on 2 times",
        ),
        (
            replace(
                sound(),
                consumed=[{**sound().consumed[0], "rollouts": ["projects/default/rollouts/a"]}, sound().consumed[1]],
            ),
            "names other rollouts",
        ),
        (replace(sound(), calls={**sound().calls, "projects/default/rollouts/b": 1}), "1 of 2 model calls"),
    ],
)
def test_each_fault_is_found(books: Books, says: str) -> None:
    problems = problems_of(books, calls_per_rollout=CALLS, min_reward=LEAST)
    assert any(says in problem for problem in problems), problems
