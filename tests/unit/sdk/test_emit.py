"""Rewards that agents emit."""

from __future__ import annotations

import asyncio
import math

import pytest

from fulmen.agent import Context, NotInAttempt, current, entered
from fulmen.emit import MAX_REWARDS, RewardInvalid, emit_reward


def context(number: int = 1) -> Context:
    return Context(rollout="projects/default/rollouts/x", attempt=f"projects/default/rollouts/x/attempts/{number}", attempt_number=number, mode="train",
                   deadline=0.0)  # fmt: skip


def test_rewards_join_the_attempt_and_the_last_of_a_kind_counts() -> None:
    with entered(context()) as attempt:
        emit_reward(1)
        emit_reward(2)
        emit_reward(0.5, dimension="style", step=3)
    assert attempt.rewards == {("reward", None, b""): 2.0, ("style", 3, b""): 0.5}
    assert current() is None


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, [1]])
def test_what_is_no_finite_number_is_refused(value: object) -> None:
    with entered(context()) as attempt, pytest.raises(RewardInvalid):
        emit_reward(value)
    assert not attempt.rewards


@pytest.mark.parametrize(("dimension", "step"), [("Big", None), ("", None), ("x" * 65, None), ("a", -1), ("a", True)])
def test_malformed_names_and_steps_are_refused(dimension: str, step: int | None) -> None:
    with entered(context()), pytest.raises(RewardInvalid):
        emit_reward(1, dimension=dimension, step=step)


def test_an_attempt_has_a_limited_number_of_rewards() -> None:
    with entered(context()):
        for step in range(MAX_REWARDS):
            emit_reward(1, step=step)
        emit_reward(2, step=0)
        with pytest.raises(RewardInvalid, match="at most"):
            emit_reward(1)


def test_outside_of_an_attempt_it_says_what_to_do() -> None:
    with pytest.raises(NotInAttempt, match="last line of output"):
        emit_reward(1)


async def test_tasks_of_one_loop_keep_their_attempts_apart() -> None:
    async def agent(number: int) -> dict[object, float]:
        with entered(context(number)) as attempt:
            await asyncio.sleep(0)
            emit_reward(number)
            await asyncio.to_thread(emit_reward, number, dimension="thread")
            return attempt.rewards

    found = await asyncio.gather(*(agent(number) for number in range(50)))
    assert found == [{("reward", None, b""): n, ("thread", None, b""): n} for n in range(50)]
