"""The files in which a command, a container or a child process reports to its runner.

`FULMEN_REWARDS_FILE` names the file of rewards. Invariant: one line of JSON per statement, written with one call, so
that several processes may write concurrently. Of rewards with the same dimension, step and span the last one counts:

    {"value": 0.5, "dimension": "style", "step": 3, "span_id": "00f067aa0ba902b7"}    only `value` is required
    {"undelivered_spans": 2}    number of spans that did not reach the store: the attempt is incomplete

`FULMEN_PROGRESS_FILE` names the file of progress. It contains one line of JSON, of at most 4096 bytes, and each report
replaces the last; the runner reads it every two seconds:

    {"fraction": 0.25, "text": "3 of 12 files"}    either member may be missing

Imports only the standard library: programs without Fulmen use them, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fulmen.agent import RewardKey

__all__ = [
    "PROGRESS_FILE_VARIABLE",
    "REWARD_MEMBERS",
    "REWARDS_FILE_VARIABLE",
    "UNDELIVERED_MEMBER",
    "append_rewards",
    "append_undelivered_spans",
    "report_undelivered_spans",
    "write_progress",
]

REWARDS_FILE_VARIABLE: Final = "FULMEN_REWARDS_FILE"
PROGRESS_FILE_VARIABLE: Final = "FULMEN_PROGRESS_FILE"

REWARD_MEMBERS: Final = frozenset({"value", "dimension", "step", "span_id"})
UNDELIVERED_MEMBER: Final = "undelivered_spans"


def append_rewards(path: str, rewards: Iterable[tuple[RewardKey, float]]) -> None:
    """Appends rewards to a file; creates it if missing."""
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
    """Reports in a file that spans of this process did not reach the store."""
    _append(path, [{UNDELIVERED_MEMBER: count}])


def report_undelivered_spans(count: int) -> None:
    """Reports undelivered spans of this process on standard error, and to the runner if any; 0 reports nothing."""
    if not count:
        return
    sys.stderr.write(f"fulmen: {count} spans of this process did not reach the store.\n")
    path = os.environ.get(REWARDS_FILE_VARIABLE)
    if path:
        append_undelivered_spans(path, count)


def write_progress(path: str, *, fraction: float | None, text: str) -> None:
    """Replaces the report in a file; creates it if missing."""
    report: dict[str, object] = {"text": text} if fraction is None else {"fraction": fraction, "text": text}
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, json.dumps(report).encode())
    finally:
        os.close(descriptor)


def _append(path: str, lines: list[dict[str, object]]) -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    # One write to a file opened for appending, so that lines of several processes do not mix.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
