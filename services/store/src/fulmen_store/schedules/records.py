"""Schedules and their runs as stored. Numbers of policies and states are those of `fulmen.store.v1`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from uuid import UUID

__all__ = [
    "ClaimedRun",
    "DueSchedule",
    "MissedPolicy",
    "NewSchedule",
    "OverlapPolicy",
    "RunState",
    "RunView",
    "ScheduleView",
]


class OverlapPolicy(IntEnum):
    """What happens at a due time while rollouts of the run before are not final."""

    ALLOW = 1
    SKIP = 2


class MissedPolicy(IntEnum):
    """What happens with due times that passed while no store was running."""

    LATEST = 1
    SKIP = 2


class RunState(IntEnum):
    """What happened at a due time."""

    STARTING = 1
    CREATED = 2
    SKIPPED = 3
    MISSED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSchedule:
    """A valid schedule to create; `spec` is the serialized message with defaults."""

    project: str
    name: str
    spec: bytes
    cron: str
    time_zone: str
    overlap_policy: int
    missed_policy: int
    rollout_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What happened at a due time."""

    due_at: datetime.datetime
    claimed_at: datetime.datetime
    state: int
    rollout_ids: Sequence[UUID]
    failure_reason: str
    failure_message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule.

    Attributes:
        next_due: None while it is paused.
        spec: Serialized message; empty in lists.
        read_at: PostgreSQL's time at which it was read; None in lists.
        last_run: Set in lists alone.
    """

    id: int
    name: str
    cron: str
    time_zone: str
    overlap_policy: int
    missed_policy: int
    rollout_count: int
    created_at: datetime.datetime
    paused_at: datetime.datetime | None
    pause_reason: str
    next_due: datetime.datetime | None
    spec: bytes = b""
    read_at: datetime.datetime | None = None
    last_run: RunView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DueSchedule:
    """A schedule whose next due time has passed; `now` is PostgreSQL's time."""

    id: int
    cron: str
    time_zone: str
    next_due: datetime.datetime
    now: datetime.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRun:
    """A due time that this replica works on, and the ids of its rollouts; none if it creates none."""

    schedule_id: int
    due_at: datetime.datetime
    state: RunState
    rollout_ids: Sequence[UUID] = ()
