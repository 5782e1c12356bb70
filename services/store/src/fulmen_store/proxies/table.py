"""Processes of the LLM proxy and their accounts of attempts in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from uuid import UUID

from fulmen_store.database.database import Database, columns

__all__ = ["AccountRow", "AttemptKey", "Counts", "ProxyTable", "Totals"]

AttemptKey = tuple[UUID, int, int]
"""Rollout, number of the attempt, number of the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Calls of an attempt, as in `fulmen.store.v1.CaptureAccount`."""

    calls: int = 0
    infra_failures: int = 0
    unusable: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    throttled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """The account of an attempt at one process; open while the store may lack captures."""

    key: AttemptKey
    is_open: bool
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The accounts of an attempt at several processes.

    Attributes:
        is_open: Whether a process that lives has an open one.
        is_lost: Whether a process was lost that may have held captures of the attempt.
    """

    is_open: bool = False
    is_lost: bool = False
    counts: Counts = Counts()


class ProxyTable:
    """Reads and writes both."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def renew(
        self, proxy: str, *, scope: str, serves_alone: bool, is_leaving: bool
    ) -> tuple[datetime.datetime, int]:
        """Renews a process; returns the database's time and the number of other processes that live."""
        row = await self._database.fetch_row("renew_proxy", proxy, scope, serves_alone, is_leaving)
        assert row is not None
        return row["store_time"], row["other_count"]

    async def save(self, proxy: str, *, scope: str, accounts: Sequence[AccountRow]) -> None:
        """Stores accounts of a process, one for each attempt."""
        rows = [(*each.key, each.is_open, *astuple(each.counts)) for each in accounts]
        await self._database.fetch("save_accounts", proxy, scope, *columns(rows, 10))

    async def totals(self, attempts: Sequence[AttemptKey], *, but: str) -> list[Totals]:
        """Returns the totals of attempts, in order, without the process `but`."""
        rows = await self._database.fetch("capture_totals", *columns(attempts, 3), but)
        found = {
            row["n"]: Totals(
                is_open=row["is_open"],
                is_lost=row["is_lost"],
                counts=Counts(
                    calls=row["call_count"],
                    infra_failures=row["infra_failure_count"],
                    unusable=row["unusable_count"],
                    prompt_tokens=row["prompt_token_count"],
                    completion_tokens=row["completion_token_count"],
                    throttled=row["throttled_count"],
                ),
            )
            for row in rows
        }
        return [found.get(n, Totals()) for n in range(1, len(attempts) + 1)]
