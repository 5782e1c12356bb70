"""The history of training runs in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import asyncpg

from fulmen_store.database.database import Database
from fulmen_store.run_history.history import (
    Axis,
    Curve,
    Distribution,
    HistoryEvent,
    Notice,
    RecordedNotice,
    RunCurves,
    StepMeasured,
)
from fulmen_store.run_leases.run_leases import RunFence
from fulmen_store.run_leases.table import hold_fences

__all__ = ["RunHistoryTable"]

MAX_MESSAGE: Final = 4096
STEP, NOTICE, ROLLBACK = 1, 2, 3


class RunHistoryTable:
    """Reads and writes the history of training runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, project_id: int, fence: RunFence, events: Sequence[HistoryEvent]) -> int:
        """Appends events under an epoch of a run; returns the sequence of its last event.

        Raises:
            RunLeaseLost: If the run has another epoch, or is not recorded.
        """
        async with self._database.transaction() as transaction:
            await hold_fences(transaction, [(project_id, fence)])
            for event in events:
                await transaction.fetch("append_run_events", project_id, fence.training_run, *_columns(event))
            row = await transaction.fetch_row("last_run_event", project_id, fence.training_run)
        return 0 if row is None else int(row["sequence"])

    async def curves(
        self, project_id: int, run: str, metrics: Sequence[str], *, axis: Axis, max_points: int
    ) -> RunCurves:
        """Returns curves of metrics of a run, each of at most `max_points` points."""
        summary = await self._database.fetch_row("run_history_summary", project_id, run)
        assert summary is not None
        first = summary["first_at"]
        rows: Sequence[asyncpg.Record] = ()
        if metrics and first is not None:
            rows = await self._database.fetch(
                "run_curves", project_id, run, list(dict.fromkeys(metrics)), axis.value, max_points, first
            )
        found = {row["name"]: _curve(row) for row in rows}
        return RunCurves(
            curves=[found[name] for name in dict.fromkeys(metrics) if name in found],
            metric_names=summary["metric_names"],
            last_sequence=summary["last_sequence"] or 0,
            first_time=first,
        )

    async def reward_distributions(self, project_id: int, run: str, *, max_steps: int) -> list[StepMeasured]:
        """Returns the rewards of at most so many steps of a run, without its metrics."""
        rows = await self._database.fetch("reward_distributions", project_id, run, max_steps)
        return [
            StepMeasured(
                step=row["step"],
                rewards=Distribution(
                    values=row["reward_values"], counts=row["reward_counts"], bin_width=row["reward_bin"] or 0.0
                ),
            )
            for row in rows
        ]

    async def notices(self, project_id: int, run: str, *, before: int, limit: int) -> list[RecordedNotice]:
        """Returns notices of a run before a sequence, newest first."""
        return [
            RecordedNotice(
                sequence=row["sequence"],
                time=row["happened_at"],
                step=row["step"],
                notice=Notice(severity=row["severity"], message=row["message"]),
            )
            for row in await self._database.fetch("run_notices", project_id, run, before, limit)
        ]


def _columns(event: HistoryEvent) -> tuple[object, ...]:
    measured, notice = event.measured, event.notice
    if measured is not None:
        rewards = measured.rewards
        told: tuple[object, ...] = (
            STEP, measured.step, list(measured.values), list(measured.values.values()),
            None if rewards is None else list(rewards.values), None if rewards is None else list(rewards.counts),
            None if rewards is None else rewards.bin_width, None, None,
        )  # fmt: skip
    elif notice is not None:
        # PostgreSQL keeps no NUL.
        text = notice.message.replace("\0", "")[:MAX_MESSAGE]
        told = (NOTICE, None, None, None, None, None, None, notice.severity, text)
    else:
        told = (ROLLBACK, event.rolled_back_to_step, None, None, None, None, None, None, None)
    return (event.sequence, event.time, *told)


def _curve(row: asyncpg.Record) -> Curve:
    return Curve(
        metric=row["name"],
        positions=row["positions"],
        values=row["values"],
        measurement_count=row["measured"],
        not_finite_count=row["not_finite"],
    )
