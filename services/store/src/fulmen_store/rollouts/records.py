"""The values that pass between the use cases of the queue and the table of rollouts."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol
from uuid import UUID

from fulmen.errors import FulmenError
from fulmen_store.resources.lifetimes import VersionKey
from fulmen_store.rollouts.transitions import FailureKind, RetryPolicy, RolloutState

__all__ = [
    "NO_RUN",
    "CancelOutcome",
    "Cancelled",
    "NameKind",
    "NewItem",
    "RolloutAppeared",
    "RolloutRetried",
    "RolloutTable",
    "RolloutView",
    "RunningAttempt",
]


# The number of no training run.
NO_RUN: Final = 0


class RolloutAppeared(FulmenError):
    """A rollout of the same id was created at the same moment; nothing of the commit was written."""


class RolloutRetried(FulmenError):
    """A dead rollout was run again at the same moment; nothing of the commit was written."""


class NameKind(IntEnum):
    """What an interned name is."""

    TASK_TYPE = 1
    AGENT = 2


# Not frozen: one is made for every rollout, and freezing makes that four times as slow. Never changed.
@dataclass(slots=True, kw_only=True)
class NewItem:
    """A row to create.

    Attributes:
        uses: those of its `versions` that have a ttl.
        retry_of: the rollout that it runs again, which is marked in the same commit; with `retry_once` only if it
            is not marked yet.
    """

    rollout_id: UUID
    project_id: int
    run_id: int | None
    group_key: UUID | None
    group_size: int
    rank: int
    not_before: datetime.datetime | None
    policy: RetryPolicy
    labels: tuple[str, ...]
    request: bytes
    mode: int = 1
    group_id: str = ""
    task_type: int | None = None
    agent: int | None = None
    deadline: datetime.datetime | None = None
    timeout_ms: int = 900_000
    hedged: bool = False
    versions: tuple[str, ...] = ()
    uses: tuple[VersionKey, ...] = ()
    retry_of: UUID | None = None
    retry_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAttempt:
    """The attempt that runs now."""

    number: int
    session_id: UUID
    host: str
    started_at: datetime.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A rollout as it is now.

    Attributes:
        running: the attempts that run now, by number: one, two of a hedged rollout, or none.
        ended_attempts: how many attempts have ended; counted in lists only.
    """

    rollout_id: UUID
    project_id: int
    request: bytes
    state: RolloutState
    failure_kind: FailureKind
    created_at: datetime.datetime
    ended_at: datetime.datetime | None
    running: Sequence[RunningAttempt]
    ended_attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """What a cancellation did to one rollout; without a session it was waiting and is now final."""

    rollout_id: UUID
    project_id: int
    session_id: UUID | None
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOutcome:
    """How many rollouts were cancelled at once, and how many were asked to stop."""

    cancelled: int
    cancelling: int


class RolloutTable(Protocol):
    """Where rollouts live."""

    async def project_id(self, name: str) -> int:
        """Returns a project's number.

        Raises:
            ProjectNotFound: if there is no such project.
        """
        ...

    async def run_id(self, project_id: int, name: str) -> int:
        """Returns a training run's number; a new run is recorded.

        Raises:
            ArgumentInvalid: if the name is malformed.
        """
        ...

    async def find_run(self, project_id: int, name: str) -> int:
        """Returns a training run's number without recording anything; `NO_RUN` if it is unknown.

        Raises:
            ArgumentInvalid: if the name is malformed.
        """
        ...

    async def name_id(self, project_id: int, kind: NameKind, name: str) -> int:
        """Returns the number of a name that many rollouts share; a new name is recorded."""
        ...

    async def create(self, items: Sequence[NewItem], sessions: Sequence[UUID | None]) -> set[UUID]:
        """Creates all of them in one commit; returns their ids.

        Args:
            items: the rows.
            sessions: for each row the runner session that gets its first lease in the same commit, or None.

        Raises:
            RolloutAppeared: if one of them exists.
            RolloutRetried: if one is to run a dead rollout again for the first time, which was already.
        """
        ...

    async def stored(self, rollout_ids: Sequence[UUID]) -> dict[UUID, tuple[int, bytes]]:
        """Returns project and request of those rollouts that exist."""
        ...

    async def view(self, rollout_ids: Sequence[UUID]) -> list[RolloutView]:
        """Returns those rollouts that exist, in the order of the ids."""
        ...

    async def live_of_run(
        self, project_id: int, run_id: int, *, after: tuple[int, UUID], limit: int
    ) -> list[tuple[int, UUID]]:
        """Returns (rank, id) of rollouts of a training run that are neither final nor asked to stop, in order."""
        ...

    async def cancel(self, rollout_ids: Sequence[UUID], *, grace_s: float) -> list[Cancelled]:
        """Cancels waiting rollouts and marks running ones, in one commit; a row that just changed is left out.

        A marked one is ended when its runner reports, and by the store after `grace_s` seconds at the latest.
        """
        ...

    async def log_request(
        self, project_id: int, method: str, request_id: str, rollout_ids: Sequence[UUID]
    ) -> list[UUID]:
        """Records the ids that a request's rollouts get unless it has some; returns the recorded ones."""
        ...

    async def logged_request(self, project_id: int, method: str, request_id: str) -> list[UUID]:
        """Returns the recorded ids of a request; none if it is not known."""
        ...

    async def forget_request(self, project_id: int, method: str, request_id: str, rollout_ids: Sequence[UUID]) -> None:
        """Removes a request's record if it holds these ids."""
        ...
