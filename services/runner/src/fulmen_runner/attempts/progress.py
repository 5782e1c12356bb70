"""What agents report of their progress, until the store gets it.

Invariant: whatever an agent reports, the store gets one line of at most 200 characters without the attempt's secrets, and
a fraction from 0 to 1; reading it takes bounded memory and never holds up the lease stream.
"""

import asyncio
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from fulmen.agent import Progress
from fulmen.emit import as_number
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.masking import masked
from fulmen_runner.attempts.workspace import Workspace
from fulmen_service_kit.observability.logs import places_of

LOOK_EVERY_S = 2.0
MAX_TEXT_CHARS = 200
MAX_FILE_BYTES = 4096
MAX_NEWS = 1000

_log = structlog.get_logger()
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """A report: the part that is done, from 0 to 1, None if unknown; and what the agent is doing, which may be empty."""

    fraction: float | None
    text: str


@dataclass(slots=True, kw_only=True)
class _Followed:
    """A running attempt; `last` is its last report."""

    assignment: Assignment
    said: Progress
    workspace: Workspace
    last: ProgressReport | None = None

    def report(self) -> ProgressReport | None:
        """Returns what the agent reported last; None if it never did. Blocks."""
        fraction: object = self.said.fraction
        text: object = self.said.text
        files = self.workspace.opened
        if files is not None and (found := read_progress_file(files.progress_file)) is not None:
            fraction, text = found.get("fraction"), found.get("text")
        report = ProgressReport(
            fraction=_fraction(fraction), text=_line(masked(str(text or ""), self.assignment.masked_values))
        )
        return report if report.text or report.fraction is not None else None


@dataclass(slots=True, kw_only=True)
class ProgressBoard:
    """Background role: looks for new reports of the running attempts.

    Attributes:
        changed: Called when there are new reports.
    """

    changed: Callable[[], None] = lambda: None
    _followed: dict[str, _Followed] = field(default_factory=dict)
    _news: dict[str, ProgressReport] = field(default_factory=dict)

    @contextmanager
    def following(self, assignment: Assignment, said: Progress, workspace: Workspace) -> Iterator[None]:
        """Follows an attempt in the block."""
        self._followed[assignment.attempt] = _Followed(assignment=assignment, said=said, workspace=workspace)
        try:
            yield
        finally:
            del self._followed[assignment.attempt]
            self._news.pop(assignment.attempt, None)

    @property
    def has_news(self) -> bool:
        """Whether there are reports that were not taken."""
        return bool(self._news)

    def take(self) -> dict[str, ProgressReport]:
        """Returns up to `MAX_NEWS` new reports by attempt, to be sent."""
        names = list(self._news)[:MAX_NEWS]
        return {name: self._news.pop(name) for name in names}

    def retake(self) -> None:
        """Makes the last reports new: the store may not have got them."""
        self._news |= {name: one.last for name, one in self._followed.items() if one.last is not None}

    async def run(self) -> None:
        """Looks until cancelled. A thread of its own reads the files: no other work waits for a slow disk."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="progress") as thread:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                await self.look(thread)

    async def look(self, thread: ThreadPoolExecutor | None = None) -> None:
        """Looks once."""
        followed = dict(self._followed)
        if not followed:
            return
        loop = asyncio.get_running_loop()
        reports = await loop.run_in_executor(thread, lambda: {name: _reported(one) for name, one in followed.items()})
        for name, report in reports.items():
            one = self._followed.get(name)
            if one is not None and report is not None and report != one.last:
                one.last = self._news[name] = report
        if self._news:
            self.changed()


def _reported(one: _Followed) -> ProgressReport | None:
    """Returns the last report of an attempt; None if there is none that can be read, whatever an agent has left in its place."""
    try:
        return one.report()
    except Exception as error:  # noqa: BLE001  # What one agent reports must not end the role of all.
        _log.warning("progress_not_read", attempt=one.assignment.attempt, error=places_of(error))
        return None


def read_progress_file(path: Path) -> dict[str, object] | None:
    """Returns the report in a file; None if there is none that can be read. Blocks."""
    try:
        # O_NOFOLLOW rejects a symbolic link; O_NONBLOCK does not wait for the writer of a pipe.
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_size > MAX_FILE_BYTES:
            return None
        document = json.loads(os.read(descriptor, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    return document if isinstance(document, dict) else None


def _fraction(value: object) -> float | None:
    number = None if isinstance(value, bool) else as_number(value)
    return None if number is None or not math.isfinite(number) else min(1.0, max(0.0, number))


def _line(text: str) -> str:
    shown = "".join(sign if sign.isprintable() else " " for sign in text[: 2 * MAX_TEXT_CHARS]).strip()
    return shown if len(shown) <= MAX_TEXT_CHARS else shown[: MAX_TEXT_CHARS - 1] + "…"
