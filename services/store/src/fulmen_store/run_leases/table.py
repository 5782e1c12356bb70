"""Leases of training runs in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final

import asyncpg

from fulmen.errors import RunLeaseHeld, RunLeaseLost, TrainingRunExists, TrainingRunNotFound
from fulmen_store.database.database import Database, Transaction
from fulmen_store.database.server_clock import LATE_S
from fulmen_store.run_leases.run_leases import Holder, NewRun, Renewal, RunFence, RunLease, RunLeaseState

__all__ = ["RunLeaseTable", "hold_fences"]

MAX_RECORDS_BYTES: Final = 2 * 1024 * 1024
POLICY_INDEX: Final = "run_lease_by_policy"


class RunLeaseTable:
    """Reads and writes leases of training runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, project_id: int, runs: Sequence[NewRun], *, storage: str) -> dict[str, RunLease]:
        """Records runs that wait for an owner, all of them or none; returns their leases by name.

        Raises:
            TrainingRunExists: If a run of one of the names or request ids is recorded.
        """
        async with self._database.transaction() as transaction:
            rows = await transaction.fetch(
                "create_run_leases",
                project_id,
                [each.training_run for each in runs],
                [each.policy for each in runs],
                [each.record for each in runs],
                [each.request_id for each in runs],
                storage,
            )
            found = {row["name"]: _lease(row, held=False) for row in rows}
            if len(rows) < len(runs):
                taken = next(
                    (each.training_run for each in runs if each.training_run not in found), runs[0].training_run
                )
                raise TrainingRunExists("The name or request id is taken by another run.", training_run=taken)
        return found

    async def acquire(
        self, project_id: int, name: str, holder: Holder, *, after_epoch: int, for_change: bool
    ) -> RunLease:
        """Acquires the lease of a recorded run under a greater epoch, to run it or only for a change.

        Raises:
            TrainingRunNotFound: If the run is not recorded.
            RunLeaseHeld: If another owner holds the lease, or the run lies in another storage, or it is to be run and
                another run of its policy has an owner that runs it.
        """
        try:
            row = await self._database.fetch_row(
                "acquire_run_lease",
                project_id,
                name,
                holder.owner,
                holder.address,
                holder.ttl_s,
                after_epoch,
                holder.storage,
                for_change,
            )
        except asyncpg.UniqueViolationError as error:
            if error.constraint_name != POLICY_INDEX:
                raise
            other = await self._database.fetch_row("owned_run_of_policy", project_id, name)
            raise _held(name if other is None else other["name"], other) from error
        if row is None:
            found = await self._database.fetch_row("get_run_lease", project_id, name)
            if found is None:
                raise TrainingRunNotFound("The training run does not exist.", training_run=name)
            raise _held(name, found)
        return _lease(row, held=True)

    async def renew(self, holder: Holder, renewals: Sequence[Renewal]) -> set[tuple[int, str]]:
        """Extends leases; returns project and name of those that the holder still holds."""
        rows = await self._database.fetch(
            "renew_run_leases",
            [each.project_id for each in renewals],
            [each.training_run for each in renewals],
            [each.epoch for each in renewals],
            [each.record for each in renewals],
            holder.owner,
            holder.address,
            holder.ttl_s,
        )
        return {(row["project_id"], row["name"]) for row in rows}

    async def release(self, project_id: int, fence: RunFence, *, state: RunLeaseState, record: bytes) -> None:
        """Ends a lease.

        Raises:
            RunLeaseLost: If the run has another epoch.
        """
        arguments = (project_id, fence.training_run, fence.epoch, state, record)
        if await self._database.fetch_row("release_run_lease", *arguments) is None:
            raise _lost(fence)

    async def page(
        self,
        *,
        after: tuple[int, str],
        projects: Sequence[int] | None,
        updated_after: datetime.datetime | None,
        unowned_for_s: float | None,
        with_records: bool,
        limit: int,
    ) -> list[RunLease]:
        """Returns runs after a project and name, in order; fewer than `limit` if their records are large."""
        rows = await self._database.fetch(
            "list_run_leases",
            *after,
            projects,
            updated_after,
            unowned_for_s,
            MAX_RECORDS_BYTES,
            not with_records,
            limit,
        )
        return [_lease(row, held=row["held"]) for row in rows]

    async def clock(self) -> datetime.datetime:
        """Returns the time of the database."""
        row = await self._database.fetch_row("store_clock")
        assert row is not None
        now: datetime.datetime = row["now"]
        return now

    async def clock_has_run_for(self, seconds: float) -> bool:
        """Returns whether the database's clock was not set for so long; see `Database.clock_has_run_for`."""
        return await self._database.clock_has_run_for(seconds)

    async def unowned(self, *, for_s: float, limit: int) -> list[tuple[int, RunFence]]:
        """Returns project and epoch of runs that nothing has run for a time and whose rollouts are not cancelled yet."""
        rows = await self._database.fetch("unowned_runs", for_s, limit, self._database.clock(), LATE_S)
        return [(row["project_id"], RunFence(training_run=row["name"], epoch=row["epoch"])) for row in rows]

    async def count_unowned(self, *, for_s: float) -> int:
        """Returns the number of runs that nothing has run for a time."""
        row = await self._database.fetch_row("count_unowned_runs", for_s)
        assert row is not None
        return int(row["count"])

    async def mark_swept(self, project_id: int, fence: RunFence) -> None:
        """Records that a run's waiting rollouts were cancelled."""
        await self._database.fetch("mark_run_swept", project_id, fence.training_run, fence.epoch)


async def hold_fences(transaction: Transaction, fences: Sequence[tuple[int, RunFence]]) -> None:
    """Keeps runs from other owners until the end of the transaction.

    Args:
        transaction: The transaction that writes for the runs.
        fences: Project and epoch of each run.

    Raises:
        RunLeaseLost: If one of them has another epoch.
    """
    for project_id, fence in sorted(fences, key=lambda each: (each[0], each[1].training_run)):
        row = await transaction.fetch_row("hold_run_epoch", project_id, fence.training_run)
        if row is None or row["epoch"] != fence.epoch:
            raise _lost(fence)


def _lost(fence: RunFence) -> RunLeaseLost:
    return RunLeaseLost("Another algorithm service runs the training run.", training_run=fence.training_run)


def _held(name: str, row: asyncpg.Record | None = None) -> RunLeaseHeld:
    address = "" if row is None else row["owner_address"]
    text = "Another algorithm service runs the training run, or another run of its policy, or holds its files."
    return RunLeaseHeld(text, training_run=name, owner_address=address)


def _lease(row: asyncpg.Record, *, held: bool) -> RunLease:
    return RunLease(
        project_id=row["project_id"],
        training_run=row["name"],
        policy=row["policy"],
        state=RunLeaseState(row["state"]),
        owner=row["owner"],
        owner_address=row["owner_address"],
        epoch=row["epoch"],
        held=held,
        expires_at=row["expires_at"],
        updated_at=row["updated_at"],
        record=row["record"],
        storage=row["storage"],
    )
