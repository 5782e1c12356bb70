"""`ScheduleService` over gRPC."""

from __future__ import annotations

from typing import Final

import grpc.aio

from fulmen.ids import parse_schedule_name, rollout_name, schedule_name
from fulmen.store.v1 import schedule_service_pb2 as pb
from fulmen.store.v1 import schedule_service_pb2_grpc
from fulmen_service_kit.security.auth import require_project
from fulmen_store.database.stored import read_column
from fulmen_store.projects.names import ProjectNames
from fulmen_store.schedules.codec import new_schedule
from fulmen_store.schedules.due_times import next_dues
from fulmen_store.schedules.records import RunView, ScheduleView
from fulmen_store.schedules.schedules import Schedules
from fulmen_store.schedules.table import ScheduleTable

__all__ = ["ScheduleService"]

TIMES_SHOWN: Final = 5


class ScheduleService(schedule_service_pb2_grpc.ScheduleServiceServicer):
    """Serves schedules."""

    def __init__(self, *, schedules: Schedules, table: ScheduleTable, projects: ProjectNames) -> None:
        self._schedules = schedules
        self._table = table
        self._projects = projects

    async def CreateSchedule(
        self, request: pb.CreateScheduleRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateScheduleResponse:
        """Creates a schedule."""
        new = new_schedule(request.schedule)
        project_id = await self._projects.require(require_project(new.project))
        return pb.CreateScheduleResponse(schedule=_message(await self._schedules.create(project_id, new), new.project))

    async def GetSchedule(
        self, request: pb.GetScheduleRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetScheduleResponse:
        """Returns a schedule with its runs and times."""
        project_id, project, name = await self._find(request.name)
        view, runs = await self._schedules.get(project_id, project, name)
        answer = pb.GetScheduleResponse(schedule=_message(view, project), runs=[_run(each, project) for each in runs])
        stored = read_column(pb.Schedule, view.spec)
        if stored is not None:
            answer.schedule.rollouts.extend(stored.rollouts)
        if runs:
            answer.schedule.last_run.CopyFrom(answer.runs[0])
        if view.next_due is not None:
            answer.next_run_times.add().FromDatetime(view.next_due)
            for due in next_dues(view.cron, view.time_zone, view.next_due, TIMES_SHOWN - 1):
                answer.next_run_times.add().FromDatetime(due)
        return answer

    async def ListSchedules(
        self, request: pb.ListSchedulesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSchedulesResponse:
        """Lists a project's schedules without their rollouts."""
        project = require_project(request.project)
        views = await self._table.list_all(await self._projects.require(project))
        return pb.ListSchedulesResponse(schedules=[_message(view, project) for view in views])

    async def PauseSchedule(
        self, request: pb.PauseScheduleRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseScheduleResponse:
        """Pauses a schedule."""
        project_id, project, name = await self._find(request.name)
        view = await self._schedules.pause(project_id, project, name, request.reason)
        return pb.PauseScheduleResponse(schedule=_message(view, project))

    async def ResumeSchedule(
        self, request: pb.ResumeScheduleRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeScheduleResponse:
        """Resumes a schedule."""
        project_id, project, name = await self._find(request.name)
        return pb.ResumeScheduleResponse(
            schedule=_message(await self._schedules.resume(project_id, project, name), project)
        )

    async def DeleteSchedule(
        self, request: pb.DeleteScheduleRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteScheduleResponse:
        """Deletes a schedule."""
        project_id, project, name = await self._find(request.name)
        await self._schedules.delete(project_id, project, name)
        return pb.DeleteScheduleResponse()

    async def _find(self, full_name: str) -> tuple[int, str, str]:
        """Returns the number and name of the project that a name is in, and the id of the schedule."""
        project, name = parse_schedule_name(full_name)
        return await self._projects.require(require_project(project)), project, name


def _message(view: ScheduleView, project: str) -> pb.Schedule:
    message = pb.Schedule(
        name=schedule_name(project, view.name),
        cron=view.cron,
        time_zone=view.time_zone,
        overlap_policy=pb.OverlapPolicy.ValueType(view.overlap_policy),
        missed_policy=pb.MissedPolicy.ValueType(view.missed_policy),
        pause_reason=view.pause_reason,
        rollout_count=view.rollout_count,
    )
    message.create_time.FromDatetime(view.created_at)
    if view.paused_at is not None:
        message.pause_time.FromDatetime(view.paused_at)
    if view.next_due is not None:
        message.next_run_time.FromDatetime(view.next_due)
    if view.last_run is not None:
        message.last_run.CopyFrom(_run(view.last_run, project))
    return message


def _run(view: RunView, project: str) -> pb.ScheduleRun:
    run = pb.ScheduleRun(
        state=pb.ScheduleRunState.ValueType(view.state),
        rollouts=[rollout_name(project, each) for each in view.rollout_ids],
        failure_reason=view.failure_reason,
        failure_message=view.failure_message,
    )
    run.due_time.FromDatetime(view.due_at)
    run.create_time.FromDatetime(view.claimed_at)
    return run
