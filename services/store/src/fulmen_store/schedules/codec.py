"""Schedules to create, and the rollouts of a due time, from protobuf."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Final

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import parse_schedule_name
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import schedule_service_pb2 as pb
from fulmen_store.malformed import noted
from fulmen_store.rollouts.codec import new_rollout
from fulmen_store.rollouts.requests import DUE_TIME, SCHEDULE, NewRollout, check_rollouts
from fulmen_store.schedules.due_times import cron_problem, time_zone_problem
from fulmen_store.schedules.records import NewSchedule

__all__ = ["new_schedule", "rollouts_of"]

MAX_ROLLOUTS: Final = 100
MAX_BYTES: Final = 1024 * 1024
# The due time comes behind it.
MAX_GROUP_ID: Final = 110
DEFAULT_TIME_ZONE: Final = "UTC"
OUTPUT_ONLY: Final = ("create_time", "pause_time", "pause_reason", "next_run_time", "rollout_count", "last_run")
UNSET: Final = ("name", "not_before_time", "deadline_time")
# Any due time: what is checked does not depend on it.
SOME_TIME: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)


def new_schedule(message: pb.Schedule) -> NewSchedule:
    """Decodes and checks a schedule to create; sets the message's unset fields to their defaults.

    Raises:
        ArgumentInvalid: With every problem.
    """
    violations: list[Violation] = []
    project = name = ""
    with noted(violations):
        project, name = parse_schedule_name(message.name, field="schedule.name")
    for field in OUTPUT_ONLY:
        message.ClearField(field)
    message.cron = " ".join(message.cron.split())
    message.time_zone = message.time_zone or DEFAULT_TIME_ZONE
    message.overlap_policy = message.overlap_policy or pb.OVERLAP_POLICY_ALLOW
    message.missed_policy = message.missed_policy or pb.MISSED_POLICY_LATEST
    violations += [Violation(field=f"schedule.{path}", description=text) for path, text in _problems(message)]
    violations += _rollout_problems(message, project)
    if violations:
        raise ArgumentInvalid("The schedule cannot be created.", violations=violations)
    return NewSchedule(
        project=project,
        name=name,
        spec=message.SerializeToString(deterministic=True),
        cron=message.cron,
        time_zone=message.time_zone,
        overlap_policy=message.overlap_policy,
        missed_policy=message.missed_policy,
        rollout_count=len(message.rollouts),
    )


def rollouts_of(message: pb.Schedule, project: str, name: str, due: datetime.datetime) -> list[NewRollout]:
    """Returns the rollouts to create at a due time; always the same ones."""
    due_time = due.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
    made = []
    for template in message.rollouts:
        rollout = rollout_pb2.Rollout()
        rollout.CopyFrom(template)
        rollout.project = project
        if rollout.group_id:
            rollout.group_id += f"@{due_time}"
        rollout.metadata[SCHEDULE] = name
        rollout.metadata[DUE_TIME] = due_time
        made.append(new_rollout(rollout))
    return made


def _problems(message: pb.Schedule) -> Iterator[tuple[str, str]]:
    if problem := cron_problem(message.cron):
        yield "cron", problem
    if problem := time_zone_problem(message.time_zone):
        yield "time_zone", problem
    if message.overlap_policy not in pb.OverlapPolicy.values():
        yield "overlap_policy", f"{message.overlap_policy} is not a known policy"
    if message.missed_policy not in pb.MissedPolicy.values():
        yield "missed_policy", f"{message.missed_policy} is not a known policy"
    if not 1 <= len(message.rollouts) <= MAX_ROLLOUTS:
        yield "rollouts", f"has {len(message.rollouts)} entries, allowed are 1 to {MAX_ROLLOUTS}"
    size_bytes = sum(each.ByteSize() for each in message.rollouts)
    if size_bytes > MAX_BYTES:
        yield "rollouts", f"has {size_bytes} bytes in all, at most {MAX_BYTES} are allowed"
    for index, each in enumerate(message.rollouts):
        if len(each.group_id) > MAX_GROUP_ID:
            yield f"rollouts[{index}].group_id", f"is longer than {MAX_GROUP_ID} characters"
        for field in {known.name for known, _ in each.ListFields()} & set(UNSET):
            yield f"rollouts[{index}].{field}", "must be unset: each due time has its own"


def _rollout_problems(message: pb.Schedule, project: str) -> list[Violation]:
    """Returns the problems of the rollouts, without those that `_problems` returns."""
    copy = pb.Schedule()
    copy.rollouts.extend(message.rollouts[:MAX_ROLLOUTS])
    problems = []
    for index, each in enumerate(copy.rollouts):
        if each.project not in ("", project):
            problems.append(
                Violation(field=f"schedule.rollouts[{index}].project", description="differs from the schedule's")
            )
        for field in UNSET:
            each.ClearField(field)
        each.group_id = each.group_id[:MAX_GROUP_ID]
    if not copy.rollouts:
        return problems
    try:
        check_rollouts(rollouts_of(copy, project or "projects/default", "", SOME_TIME), request_id="", now_ms=None)
    except ArgumentInvalid as error:
        problems += [
            Violation(field=f"schedule.{each.field}", description=each.description) for each in error.violations
        ]
    return problems
