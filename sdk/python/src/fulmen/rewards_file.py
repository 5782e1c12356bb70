"""The file by which a command, a container or a child process tells its runner what it has to say of its attempt.

Invariant: one line of JSON for each statement, written in one piece, so that several processes may write at once; of
rewards with the same dimension, step and span the last one counts. `FULMEN_REWARDS_FILE` names the file:

    {"value": 0.5, "dimension": "style", "step": 3, "span_id": "00f067aa0ba902b7"}    only `value` is needed
    {"undelivered_spans": 2}    that many spans did not reach the store: the attempt is not complete
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fulmen.agent import FINAL_DIMENSION, RewardKey
from fulmen.emit import RewardInvalid, checked_reward

__all__ = ["REWARDS_FILE_VARIABLE", "Statements", "append_rewards", "append_undelivered_spans", "read_statements"]

REWARDS_FILE_VARIABLE: Final = "FULMEN_REWARDS_FILE"

_REWARD_FIELDS: Final = frozenset({"value", "dimension", "step", "span_id"})
_UNDELIVERED: Final = "undelivered_spans"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    """What a file says.

    Attributes:
        undelivered_spans: How many spans did not reach the store.
    """

    rewards: dict[RewardKey, float]
    undelivered_spans: int = 0


def append_rewards(path: str, rewards: Iterable[tuple[RewardKey, float]]) -> None:
    """Adds rewards to a file; makes the file if need be."""
    lines = []
    for (dimension, step, span_id), value in rewards:
        line: dict[str, object] = {"value": value, "dimension": dimension}
        if step is not None:
            line["step"] = step
        if span_id:
            line["span_id"] = span_id.hex()
        lines.append(line)
    _append(path, lines)


def append_undelivered_spans(path: str, count: int) -> None:
    """Says that spans of this process did not reach the store."""
    _append(path, [{_UNDELIVERED: count}])


def read_statements(text: str) -> Statements:
    """Reads a file. Empty lines are skipped.

    Raises:
        RewardInvalid: With the line's number, if a line is not what it should be.
    """
    rewards: dict[RewardKey, float] = {}
    undelivered = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            statement = json.loads(line)
            if not isinstance(statement, dict):
                raise RewardInvalid("It is not a JSON object.")
            if _UNDELIVERED in statement:
                undelivered += _count(statement[_UNDELIVERED])
                continue
            key, value = _reward(statement)
        except (ValueError, RecursionError) as error:
            raise RewardInvalid(f"Line {number} of the rewards file: {error}") from None
        rewards[key] = value
    return Statements(rewards=rewards, undelivered_spans=undelivered)


def _reward(statement: dict[str, object]) -> tuple[RewardKey, float]:
    unknown = sorted(statement.keys() - _REWARD_FIELDS)
    if unknown or "value" not in statement:
        raise RewardInvalid(f"A reward has a value, and no {unknown[0]!r}." if unknown else "It has no value.")
    dimension, step = statement.get("dimension") or FINAL_DIMENSION, statement.get("step")
    text = statement.get("span_id") or ""
    if not isinstance(text, str):
        raise RewardInvalid(f"The span_id {text!r} is not 16 hexadecimal digits.")
    span_id = bytes.fromhex(text)
    value = checked_reward(statement["value"], dimension=dimension, step=step, span_id=span_id)  # type: ignore[arg-type]  # It checks the types.
    return (dimension, step, span_id), value  # type: ignore[return-value]  # Checked in the line before.


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RewardInvalid(f"{_UNDELIVERED} is {value!r}, not a number of spans.")
    return value


def _append(path: str, lines: list[dict[str, object]]) -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    # One write to a file opened for appending: lines of several processes do not mix.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
