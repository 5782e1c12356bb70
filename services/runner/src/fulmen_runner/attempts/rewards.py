"""Reads rewards out of what agents and graders return."""

import json
from collections.abc import Mapping

from fulmen.agent import FINAL_DIMENSION, RewardKey
from fulmen.emit import MAX_REWARDS, RewardInvalid, as_number, checked_reward
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import Reward


def reward_of_number(value: object) -> tuple[Reward, ...]:
    """Reads the final reward from what an agent returned; empty if that is not a number.

    Raises:
        AgentFailed: If it is a number that is not finite.
    """
    return () if not _is_number(value) else (checked(value, dimension=FINAL_DIMENSION),)


def rewards_of_grade(value: object) -> tuple[Reward, ...]:
    """Reads rewards from a number or a mapping from dimension to number; None and an empty mapping give none.

    Raises:
        AgentFailed: If it is something else, or a number is not finite.
    """
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(checked(number, dimension=dimension) for dimension, number in value.items())
    if not _is_number(value):
        raise AgentFailed(f"A grade is a number or a mapping from dimension to number, not {type(value).__name__}.")
    return (checked(value, dimension=FINAL_DIMENSION),)


def rewards_of_last_line(output: str) -> tuple[Reward, ...]:
    """Reads rewards from the last line of a command's output; empty if that is neither a number nor a JSON object.

    Raises:
        AgentFailed: If the line is a number or object that holds something other than finite numbers.
    """
    lines = output.rstrip().rsplit("\n", maxsplit=1)
    try:
        value = json.loads(lines[-1])
    except ValueError:
        return ()
    if isinstance(value, bool) or not isinstance(value, (int, float, dict)):
        return ()
    return rewards_of_grade(value)


def rewards_of_emitted(emitted: Mapping[RewardKey, float]) -> tuple[Reward, ...]:
    """Returns what the agent emitted."""
    return tuple(
        Reward(dimension=dimension, step=step, span_id=span_id, value=value)
        for (dimension, step, span_id), value in emitted.items()
    )


def joined(*parts: tuple[Reward, ...]) -> tuple[Reward, ...]:
    """Joins rewards, unique by dimension, step and span; later parts replace earlier ones.

    Raises:
        AgentFailed: If there are more than an attempt may have.
    """
    unique = {(reward.dimension, reward.step, reward.span_id): reward for part in parts for reward in part}
    if len(unique) > MAX_REWARDS:
        raise AgentFailed(f"An attempt has at most {MAX_REWARDS} rewards, not {len(unique)}.")
    return tuple(unique.values())


def checked(value: object, *, dimension: object, step: int | None = None, span_id: bytes = b"") -> Reward:
    """Returns a reward.

    Raises:
        AgentFailed: If the value is not a finite number, or its dimension, step or span is malformed.
    """
    name = str(dimension)
    try:
        number = checked_reward(value, dimension=name, step=step, span_id=span_id)
    except RewardInvalid as error:
        raise AgentFailed(str(error)) from None
    return Reward(dimension=name, step=step, span_id=span_id, value=number)


def _is_number(value: object) -> bool:
    return as_number(value) is not None
