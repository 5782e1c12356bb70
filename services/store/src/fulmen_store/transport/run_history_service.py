"""`RunHistoryService` over gRPC: curves, distributions of rewards and notices of training runs."""

from __future__ import annotations

import datetime
from typing import Final

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.ids import parse_training_run_name
from fulmen.store.v1 import run_history_service_pb2 as pb
from fulmen.store.v1 import run_history_service_pb2_grpc
from fulmen.type.v1 import reward_distribution_pb2
from fulmen_service_kit.rpc.message_sizes import fitting
from fulmen_service_kit.security.auth import require_project
from fulmen_store.malformed import malformed, malformed_request
from fulmen_store.projects.names import NO_PROJECT, ProjectNames
from fulmen_store.run_history.history import (
    MAX_SEQUENCE,
    Axis,
    Distribution,
    HistoryEvent,
    Notice,
    RecordedNotice,
    RunCurves,
    StepMeasured,
    curve_problems,
    event_problems,
)
from fulmen_store.run_history.table import RunHistoryTable
from fulmen_store.run_leases.run_leases import check_epoch
from fulmen_store.transport.access import require_range, run_fence
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size

__all__ = ["RunHistoryService"]

DEFAULT_POINTS: Final = 500
DEFAULT_STEPS: Final = 100
MAX_STEPS: Final = 500
DEFAULT_PAGE: Final = 50
MAX_PAGE: Final = 500
SEQUENCE_BYTES: Final = 8


class RunHistoryService(run_history_service_pb2_grpc.RunHistoryServiceServicer):
    """Serves the history of training runs."""

    def __init__(self, *, table: RunHistoryTable, projects: ProjectNames) -> None:
        self._table = table
        self._projects = projects

    async def AppendRunHistory(
        self, request: pb.AppendRunHistoryRequest, context: grpc.aio.ServicerContext
    ) -> pb.AppendRunHistoryResponse:
        """Appends events of a run."""
        fence = run_fence(request)
        if fence is None:
            raise malformed("run_fence", "is required")
        project = require_project(parse_training_run_name(fence.training_run).project)
        events = [_event(each) for each in request.events]
        problems = [*check_epoch("run_fence.epoch", fence.epoch), *event_problems(events)]
        if problems:
            raise malformed_request(problems)
        last = await self._table.append(await self._projects.require(project), fence, events)
        return pb.AppendRunHistoryResponse(last_sequence=last)

    async def GetRunMetrics(
        self, request: pb.GetRunMetricsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetRunMetricsResponse:
        """Returns curves of metrics of many runs."""
        runs, metrics = list(dict.fromkeys(request.training_runs)), list(dict.fromkeys(request.metrics))
        points = request.max_points or DEFAULT_POINTS
        problems = list(curve_problems(runs=len(runs), metrics=len(metrics), points=points))
        if problems:
            raise malformed_request(problems)
        axis = _axis(request.axis)
        projects = [await self._project(run) for run in runs]
        found = [
            await self._table.curves(project, run, metrics, axis=axis, max_points=points)
            for run, project in zip(runs, projects, strict=True)
        ]
        return pb.GetRunMetricsResponse(runs=[_run(run, each) for run, each in zip(runs, found, strict=True)])

    async def ListRewardDistributions(
        self, request: pb.ListRewardDistributionsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRewardDistributionsResponse:
        """Returns how rewards were distributed at steps of a run."""
        steps = request.max_steps or DEFAULT_STEPS
        require_range("max_steps", steps, 1, MAX_STEPS)
        project = await self._project(request.training_run)
        found = await self._table.reward_distributions(project, request.training_run, max_steps=steps)
        return pb.ListRewardDistributionsResponse(
            steps=[pb.StepRewards(step=each.step, rewards=_rewards(each.rewards)) for each in found if each.rewards]
        )

    async def ListRunNotices(
        self, request: pb.ListRunNoticesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRunNoticesResponse:
        """Lists the notices of a run."""
        limit = min(page_size(request.page_size, default=DEFAULT_PAGE), MAX_PAGE)
        project = await self._project(request.training_run)
        listed = f"runNotices/{request.training_run}"
        key = decode_token(request.page_token, listed=listed, key_bytes=SEQUENCE_BYTES)
        before = MAX_SEQUENCE + 1 if key is None else int.from_bytes(key)
        found = await self._table.notices(project, request.training_run, before=before, limit=limit + 1)
        shown = fitting(_notice(each) for each in found[:limit])
        more = len(shown) < len(found)
        token = encode_token(shown[-1].sequence.to_bytes(SEQUENCE_BYTES), listed=listed) if more else ""
        return pb.ListRunNoticesResponse(notices=shown, next_page_token=token)

    async def _project(self, training_run: str) -> int:
        """Returns the project of a run that the caller may see, or NO_PROJECT if it does not exist.

        Raises:
            ArgumentInvalid: If the name is malformed.
            PermissionDenied: If the caller is bound to another project.
        """
        project = require_project(parse_training_run_name(training_run).project)
        return await self._projects.find(project) or NO_PROJECT


def _axis(value: int) -> Axis:
    try:
        return Axis(value or Axis.STEP)
    except ValueError:
        raise malformed("axis", "is not an axis") from None


def _event(message: pb.RunHistoryEvent) -> HistoryEvent:
    kind = message.WhichOneof("event")
    step, notice = message.step, message.notice
    rewards = step.rewards
    return HistoryEvent(
        sequence=message.sequence,
        time=_moment(message.event_time),
        measured=StepMeasured(
            step=step.step,
            values=dict(step.values),
            rewards=Distribution(values=list(rewards.values), counts=list(rewards.counts), bin_width=rewards.bin_width)
            if step.HasField("rewards")
            else None,
        )
        if kind == "step"
        else None,
        notice=Notice(severity=notice.severity, message=notice.message) if kind == "notice" else None,
        rolled_back_to_step=message.rolled_back_to_step if kind == "rolled_back_to_step" else None,
    )


def _moment(field: Timestamp) -> datetime.datetime:
    try:
        return field.ToDatetime(tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        raise malformed("events.event_time", "is not a time between the years 1 and 9999") from None


def _run(name: str, found: RunCurves) -> pb.RunMetrics:
    message = pb.RunMetrics(
        training_run=name,
        curves=[
            pb.RunCurve(
                metric=each.metric,
                positions=each.positions,
                values=each.values,
                measurement_count=each.measurement_count,
                not_finite_count=each.not_finite_count,
            )
            for each in found.curves
        ],
        metric_names=found.metric_names,
        last_sequence=found.last_sequence,
    )
    if found.first_time is not None:
        message.first_event_time.FromDatetime(found.first_time)
    return message


def _rewards(found: Distribution) -> reward_distribution_pb2.RewardDistribution:
    return reward_distribution_pb2.RewardDistribution(
        values=found.values, counts=found.counts, bin_width=found.bin_width
    )


def _notice(found: RecordedNotice) -> pb.RecordedNotice:
    message = pb.RecordedNotice(
        sequence=found.sequence, step=found.step, severity=found.notice.severity, message=found.notice.message
    )
    message.event_time.FromDatetime(found.time)
    return message
