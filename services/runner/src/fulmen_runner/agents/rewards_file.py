"""Reads the rewards file of a process (FULMEN_REWARDS_FILE).

Invariant: whatever the process did to the file, reading it terminates, takes bounded memory, and reads no other file.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from fulmen.agent import FINAL_DIMENSION
from fulmen.attempt_files import REWARD_MEMBERS, UNDELIVERED_MEMBER
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_runner.attempts.outcome import Reward
from fulmen_runner.attempts.rewards import checked

MAX_REWARDS_FILE_BYTES = 1024 * 1024

_MAX_PROBLEMS_NAMED = 10
_MAX_PROBLEM_LENGTH = 150
_SPAN_ID_DIGITS = 16
_UNDELIVERED = re.compile(rb'{"%b": ([0-9]{1,9})}' % UNDELIVERED_MEMBER.encode())

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_rewards_file(path: Path) -> tuple[Reward, ...]:
    """Returns the rewards in a file; none if it was deleted. Blocks.

    Raises:
        AgentFailed: If the file is too large, not a regular file, or malformed.
        HostUnavailable: See `read_rewards`.
    """
    return read_rewards(_content(path))


def read_rewards(content: bytes) -> tuple[Reward, ...]:
    """Parses the format of `fulmen.attempt_files`; a later reward overrides an earlier one with the same key.

    Raises:
        AgentFailed: If a line is malformed; lists all problems.
        HostUnavailable: If the process reported undelivered spans.
    """
    rewards: dict[tuple[str, int | None, bytes], Reward] = {}
    problems: list[str] = []
    undelivered = 0
    for number, line in enumerate(_lines(content), start=1):
        if found := _UNDELIVERED.fullmatch(line):
            undelivered += int(found[1])
            continue
        try:
            reward = _reward(line)
        except AgentFailed as error:
            problems.append(f"line {number}: {str(error)[:_MAX_PROBLEM_LENGTH]}")
            continue
        if reward is not None:
            rewards[reward.dimension, reward.step, reward.span_id] = reward
    if problems:
        more = len(problems) - _MAX_PROBLEMS_NAMED
        named = problems[:_MAX_PROBLEMS_NAMED] + ([f"and {more} more"] if more > 0 else [])
        raise AgentFailed("rewards file is malformed: " + "; ".join(named))
    if undelivered:
        raise HostUnavailable(f"{undelivered} spans of the agent did not reach the store")
    return tuple(rewards.values())


def _content(path: Path) -> bytes:
    try:
        # O_NOFOLLOW rejects a symbolic link; O_NONBLOCK does not wait for the writer of a pipe.
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise AgentFailed(f"rewards file cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise AgentFailed("rewards file is not a regular file with a single link")
        if status.st_size > MAX_REWARDS_FILE_BYTES:
            raise AgentFailed(f"rewards file has {status.st_size} bytes; at most {MAX_REWARDS_FILE_BYTES} are allowed")
        return os.read(descriptor, MAX_REWARDS_FILE_BYTES)
    finally:
        os.close(descriptor)


def _lines(content: bytes) -> Iterator[bytes]:
    return (line.strip() for line in content.split(b"\n"))


def _reward(line: bytes) -> Reward | None:
    if not line:
        return None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise AgentFailed(f"{line[:60]!r} is not JSON") from None
    if not isinstance(document, dict) or "value" not in document:
        raise AgentFailed("not an object with a value")
    if unknown := sorted(document.keys() - REWARD_MEMBERS):
        raise AgentFailed(f"unknown member {unknown[0][:60]!r}")
    dimension = document.get("dimension", FINAL_DIMENSION)
    if not isinstance(dimension, str):
        raise AgentFailed("dimension is not a string")
    return checked(
        document["value"],
        dimension=dimension,
        step=document.get("step"),
        span_id=_span_id(document.get("span_id")),
    )


def _span_id(value: object) -> bytes:
    if value is None:
        return b""
    if isinstance(value, str) and len(value) == _SPAN_ID_DIGITS:
        try:
            return bytes.fromhex(value)
        except ValueError:
            pass
    raise AgentFailed(f"span_id is not {_SPAN_ID_DIGITS} hexadecimal digits")
