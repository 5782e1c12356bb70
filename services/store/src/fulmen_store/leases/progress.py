"""Background role: writes what agents report of their progress, once a second, of each attempt the last.

It is shown while the attempt runs, and lost with a replica that is killed before: the agent reports again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final
from uuid import UUID

from fulmen.errors import ArgumentInvalid, DatabaseUnavailable
from fulmen.ids import parse_attempt_name
from fulmen.store.v1 import attempt_pb2
from fulmen.store.v1 import lease_service_pb2 as pb
from fulmen_store.database.database import Database, columns

__all__ = ["ProgressTable", "ProgressWriter"]

WRITE_EVERY_S: Final = 1.0
MAX_REPORTS: Final = 1000
# What is more than a second's writes can take is dropped: it would be old when it is written.
MAX_PENDING: Final = 20_000
MAX_TEXT_CHARS: Final = 200

# The session that reports, the number of the attempt, and the stored report, by rollout.
Reports = Mapping[UUID, tuple[UUID, int, bytes]]


class ProgressTable:
    """Writes the progress of running attempts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def now_s(self) -> float:
        """Returns the time of the database, Unix seconds."""
        return self._database.clock()

    async def write(self, reports: Reports) -> None:
        """Writes reports; reports of attempts that the session does not hold change nothing."""
        rows = [(rollout_id, *report) for rollout_id, report in reports.items()]
        await self._database.fetch("report_progress", *columns(rows, 4))


class ProgressWriter:
    """Keeps the last report of each attempt until it is written."""

    def __init__(self, table: ProgressTable) -> None:
        self._table = table
        self._pending: dict[UUID, tuple[UUID, int, bytes]] = {}

    def report(self, session_id: UUID, reports: Iterable[pb.ReportedProgress]) -> None:
        """Takes reports of a runner session; ignores those that are malformed."""
        for one in islice(reports, MAX_REPORTS):
            try:
                name = parse_attempt_name(one.attempt)
            except ArgumentInvalid:
                continue
            stored = _stored(one.progress, now_s=self._table.now_s())
            if stored and (name.rollout_id in self._pending or len(self._pending) < MAX_PENDING):
                self._pending[name.rollout_id] = (session_id, name.number, stored)

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            try:
                await self.write_once()
            except DatabaseUnavailable:
                continue

    async def write_once(self) -> None:
        """Writes what is pending.

        Raises:
            DatabaseUnavailable: If it cannot be written; it is dropped.
        """
        pending, self._pending = self._pending, {}
        for part in _parts(list(pending.items()), MAX_REPORTS):
            await self._table.write(dict(part))


def _parts(
    items: Sequence[tuple[UUID, tuple[UUID, int, bytes]]], size: int
) -> Iterable[Sequence[tuple[UUID, tuple[UUID, int, bytes]]]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _stored(progress: attempt_pb2.AttemptProgress, *, now_s: float) -> bytes:
    """Encodes a report to store; empty if it is malformed or empty."""
    kept = attempt_pb2.AttemptProgress()
    if progress.HasField("fraction"):
        if not (math.isfinite(progress.fraction) and 0 <= progress.fraction <= 1):
            return b""
        kept.fraction = progress.fraction
    kept.text = "".join(sign if sign.isprintable() else " " for sign in progress.text[:MAX_TEXT_CHARS])
    if not kept.ByteSize():
        return b""
    kept.update_time.FromNanoseconds(round(now_s * 1e9))
    return kept.SerializeToString(deterministic=True)
