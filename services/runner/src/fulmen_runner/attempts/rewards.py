"""Reads rewards from the return values of agents and graders."""

import json
from collections.abc import Mapping

from fulmen.agent import FINAL_DIMENSION, RewardKey
from fulmen.emit import MAX_REWARDS, RewardInvalid, as_number, checked_reward
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import Reward


def reward_of_number(value: object) -> tuple[Reward, ...]:
    """Returns the final reward of an agent that returned a number, otherwise none.

    Raises:
        AgentFailed: If the number is not finite.
    """
    return () if not _is_number(value) else (checked(value, dimension=FINAL_DIMENSION),)


def rewards_of_grade(value: object) -> tuple[Reward, ...]:
    """Returns the rewards of a grade: a number, a mapping from dimension to number, or None for no reward.

    Raises:
        AgentFailed: If the grade has another type or a number is not finite.
    """
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(checked(number, dimension=dimension) for dimension, number in value.items())
    if not _is_number(value):
        raise AgentFailed(f"grade must be a number or a mapping from dimension to number, not {type(value).__name__}")
    return (checked(value, dimension=FINAL_DIMENSION),)


def rewards_of_last_line(output: str) -> tuple[Reward, ...]:
    """Returns the rewards in the last line of a command's output; none if it is neither a number nor a JSON object.

    Raises:
        AgentFailed: If a value in the line is not a finite number.
    """
    lines = output.rstrip().rsplit("\n", maxsplit=1)
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return ()
    if isinstance(value, bool) or not isinstance(value, (int, float, dict)):
        return ()
    return rewards_of_grade(value)


def rewards_of_emitted(emitted: Mapping[RewardKey, float]) -> tuple[Reward, ...]:
    """Returns the emitted rewards."""
    return tuple(
        Reward(dimension=dimension, step=step, span_id=span_id, value=value)
        for (dimension, step, span_id), value in emitted.items()
    )


def joined(*parts: tuple[Reward, ...]) -> tuple[Reward, ...]:
    """Merges rewards by dimension, step and span; later parts override earlier ones.

    Raises:
        AgentFailed: If there are more than `MAX_REWARDS`.
    """
    unique = {(reward.dimension, reward.step, reward.span_id): reward for part in parts for reward in part}
    if len(unique) > MAX_REWARDS:
        raise AgentFailed(f"attempt has {len(unique)} rewards; at most {MAX_REWARDS} are allowed")
    return tuple(unique.values())


def checked(value: object, *, dimension: object, step: int | None = None, span_id: bytes = b"") -> Reward:
    """Returns a validated reward.

    Raises:
        AgentFailed: If the value is not a finite number, or the dimension, step or span is malformed.
    """
    name = str(dimension)
    try:
        number = checked_reward(value, dimension=name, step=step, span_id=span_id)
    except RewardInvalid as error:
        raise AgentFailed(str(error)) from None
    return Reward(dimension=name, step=step, span_id=span_id, value=number)


def _is_number(value: object) -> bool:
    return as_number(value) is not None
