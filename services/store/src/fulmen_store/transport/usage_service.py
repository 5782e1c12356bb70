"""`UsageService` over gRPC: usage of model calls, and the rate limits that proxies share."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.ids import RolloutName, attempt_name, parse_attempt_name, parse_rollout_name, rollout_name
from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen.store.v1 import usage_service_pb2_grpc
from fulmen.store.v1.model_limits_pb2 import ModelLimits
from fulmen_service_kit.rpc.message_sizes import fitting
from fulmen_service_kit.security.auth import current_caller
from fulmen_store.database.stored import read_column
from fulmen_store.malformed import malformed
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.transport.access import project_limit, require_range, run_project
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.usage.series import Period, Periods, Series, SeriesSelection, periods_of, series_of
from fulmen_store.usage.sync import UsageSync
from fulmen_store.usage.table import UsageTable
from fulmen_store.usage.usage import (
    Grouping,
    LimitKey,
    Selection,
    SpendEntry,
    Spends,
    UsageCounts,
    UsageEntry,
    UsageGroup,
    UsageReport,
    Window,
    merged,
    slot_of,
)

__all__ = ["UsageService", "fill_spent"]

DEFAULT_PAGE: Final = 100
DEFAULT_SERIES: Final = 10
MAX_SERIES: Final = 50
OTHERS_BYTES: Final = 1024 * 1024
# Longer than any name of a group in UTF-8, so that page keys have a fixed length.
NAME_BYTES: Final = 560
NO_ROLLOUT: Final = UUID(int=0)
EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class UsageService(usage_service_pb2_grpc.UsageServiceServicer):
    """Serves usage."""

    def __init__(self, *, sync: UsageSync, table: UsageTable, rollouts: RolloutTable) -> None:
        self._sync = sync
        self._table = table
        self._rollouts = rollouts

    async def SyncUsage(self, request: pb.SyncUsageRequest, context: grpc.aio.ServicerContext) -> pb.SyncUsageResponse:
        """Stores the counts of a proxy process and returns the others'."""
        windows = [each for each in request.windows if current_caller().may_access(each.project)]
        report = _report(request, windows)
        rejected = await self._sync.sync(report, may_access=current_caller().may_access)
        project = project_limit()
        now = await self._table.clock()
        asked = {(each.project, each.backend, each.attempt) for each in windows if each.attempt}
        others = merged(
            await self._table.other_windows(request.instance_id, project=project),
            slot=slot_of(now),
            wanted=lambda key: _may_see(key) and (not key[2] or key in asked),
        )
        limits = [
            pb.ProjectModelLimits(project=name, limits=each)
            for name, stored in await self._table.model_limits(project=project)
            if (each := read_column(ModelLimits, stored)) is not None
        ]
        if any(each.limits.budgets for each in limits):
            spends = await self._table.spends(project=project)
            for each in limits:
                fill_spent(each.limits, each.project, spends)
        response = pb.SyncUsageResponse(
            limits=limits,
            # Those of attempts come last.
            others=fitting(
                (_window(each) for each in sorted(others, key=lambda each: bool(each.key[2]))), max_bytes=OTHERS_BYTES
            ),
            attempts=[
                pb.AttemptTokens(attempt=str(attempt), token_count=tokens)
                for attempt, tokens in await self._table.attempt_tokens(report.attempts)
            ],
            rejected_count=rejected,
        )
        response.store_time.FromDatetime(now)
        return response

    async def GetUsage(self, request: pb.GetUsageRequest, context: grpc.aio.ServicerContext) -> pb.GetUsageResponse:
        """Sums up usage by group."""
        rollout = parse_rollout_name(request.rollout, field="rollout") if request.rollout else None
        named = request.project or (rollout.project if rollout else "")
        project = run_project(named, request.training_run)
        if request.group_by == pb.USAGE_GROUPING_PROJECT:
            raise malformed("group_by", "is PROJECT. Use GetUsageSeries")
        listed = _listed(request, project)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        last = decode_token(request.page_token, listed=listed, key_bytes=NAME_BYTES)
        project_id = await self._rollouts.project_id(project)
        run = request.training_run
        selection = Selection(
            project_id=project_id,
            run_id=await self._rollouts.find_run(project_id, run) if run else None,
            rollout_id=_rollout_id(rollout, project),
            start=_moment(request.start_time, "start_time") if request.HasField("start_time") else None,
            end=_moment(request.end_time, "end_time") if request.HasField("end_time") else None,
            grouping=_grouping(request.group_by),
            after=None if last is None else last.rstrip(b"\0").decode(errors="replace"),
        )
        found = await self._table.page(selection, limit=limit + 1)
        token = ""
        if len(found) > limit:
            token = encode_token(found[limit - 1].name.encode().ljust(NAME_BYTES, b"\0"), listed=listed)
        groups = [_group(each, selection.grouping, project) for each in found[:limit]]
        return pb.GetUsageResponse(groups=groups, next_page_token=token)

    async def GetUsageSeries(
        self, request: pb.GetUsageSeriesRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetUsageSeriesResponse:
        """Sums up usage by group and period."""
        grouping = _grouping(request.group_by)
        if grouping in (Grouping.ROLLOUT, Grouping.ATTEMPT):
            raise malformed("group_by", "is ROLLOUT or ATTEMPT, which have no series. Use GetUsage")
        if request.training_run and grouping is Grouping.PROJECT:
            raise malformed("group_by", "is PROJECT, but training_run names one run")
        require_range("max_series", request.max_series or DEFAULT_SERIES, 1, MAX_SERIES)
        max_series = request.max_series or DEFAULT_SERIES
        project_ids, run_id = await self._reach(request, grouping)
        end = _moment(request.end_time, "end_time") if request.HasField("end_time") else await self._table.clock()
        start = _moment(request.start_time, "start_time") if request.HasField("start_time") else None
        periods = periods_of(_period(request.period), start=start, end=end, first=EPOCH)
        rows = await self._table.series(
            SeriesSelection(
                project_ids=project_ids, run_id=run_id, periods=periods, grouping=grouping, max_series=max_series
            )
        )
        series, others, other_count = series_of(rows, max_series=max_series)
        response = pb.GetUsageSeriesResponse(
            series=[_series(each, periods) for each in series],
            others=None if others is None else _series(others, periods),
            other_count=other_count,
        )
        response.start_time.FromDatetime(periods.start)
        response.end_time.FromDatetime(periods.end)
        return response

    async def _reach(
        self, request: pb.GetUsageSeriesRequest, grouping: Grouping
    ) -> tuple[Sequence[int] | None, int | None]:
        """Returns the numbers of the projects, None for all, and the training run's number."""
        limit = project_limit()
        if grouping is Grouping.PROJECT and not request.project and limit is None:
            return None, None
        project_id = await self._rollouts.project_id(run_project(request.project, request.training_run))
        run = request.training_run
        return [project_id], await self._rollouts.find_run(project_id, run) if run else None


def fill_spent(limits: ModelLimits, project: str, spends: Spends) -> None:
    """Sets what is spent of each budget of a project."""
    for budget in limits.budgets:
        budget.spent_micros = spends.get((project, budget.subject, budget.period), 0)


def _report(request: pb.SyncUsageRequest, windows: Sequence[pb.LimitWindow]) -> UsageReport:
    stored = pb.SyncUsageRequest(windows=windows)
    names = {each.attempt for each in windows if each.attempt}
    parsed = [parse_attempt_name(name, field="windows[].attempt") for name in sorted(names)]
    return UsageReport(
        instance_id=request.instance_id,
        scope=current_caller().project,
        sequence=request.sequence,
        entries=[_entry(each, index) for index, each in enumerate(request.usage)],
        spend=[
            SpendEntry(project=each.project, subject=each.subject, period=each.period, cost_micros=each.cost_micros)
            for each in request.spend
        ],
        windows=stored.SerializeToString(),
        window_count=len(request.windows),
        slot=request.slot,
        attempts=[attempt for attempt in parsed if current_caller().may_access(attempt.project)],
    )


def _entry(delta: pb.UsageDelta, index: int) -> UsageEntry:
    attempt = parse_attempt_name(delta.attempt, field=f"usage[{index}].attempt") if delta.attempt else None
    # An attempt of another project is ignored; the calls count for the project as a whole.
    known = attempt if attempt is not None and attempt.project == delta.project else None
    usage = delta.usage
    return UsageEntry(
        project=delta.project,
        rollout_id=None if known is None else known.rollout_id,
        attempt=None if known is None else known.number,
        model=delta.model,
        backend=delta.backend,
        counts=(
            usage.request_count,
            usage.failure_count,
            usage.prompt_token_count,
            usage.cached_token_count,
            usage.completion_token_count,
            usage.cost_micros,
        ),
    )


def _rollout_id(rollout: RolloutName | None, project: str) -> UUID | None:
    """Returns the requested rollout; a nonexistent one if its name is in another project."""
    if rollout is None:
        return None
    return rollout.rollout_id if rollout.project == project else NO_ROLLOUT


def _may_see(key: LimitKey) -> bool:
    return current_caller().may_access(key[0])


def _window(window: Window) -> pb.LimitWindow:
    project, backend, attempt = window.key
    return pb.LimitWindow(
        project=project,
        backend=backend,
        attempt=attempt,
        request_counts=window.requests,
        token_counts=window.tokens,
        in_flight_count=window.in_flight,
        reserved_token_count=window.reserved,
    )


def _group(group: UsageGroup, grouping: Grouping, project: str) -> pb.UsageGroup:
    name = group.name
    if grouping is Grouping.ROLLOUT:
        name = rollout_name(project, name)
    elif grouping is Grouping.ATTEMPT:
        rollout_id, _, number = name.partition("/")
        name = attempt_name(project, rollout_id, int(number))
    return pb.UsageGroup(name=name, usage=_usage(group.counts))


def _series(series: Series, periods: Periods) -> pb.UsageSeries:
    message = pb.UsageSeries(name=series.name, total=_usage(series.total))
    for place, counts in series.points:
        message.points.add(usage=_usage(counts)).start_time.FromDatetime(periods.begin(place))
    return message


def _usage(counts: UsageCounts) -> pb.Usage:
    requests, failures, prompt, cached, completion, cost = counts
    return pb.Usage(
        request_count=requests,
        failure_count=failures,
        prompt_token_count=prompt,
        cached_token_count=cached,
        completion_token_count=completion,
        cost_micros=cost,
    )


def _period(number: int) -> Period:
    try:
        return Period(number or Period.DAY)
    except ValueError:
        raise malformed("period", "is not a known period") from None


def _grouping(number: int) -> Grouping:
    try:
        return Grouping(number)
    except ValueError:
        raise malformed("group_by", "is not a known grouping") from None


def _moment(field: Timestamp, path: str) -> datetime.datetime:
    try:
        return max(field.ToDatetime(tzinfo=datetime.UTC), EPOCH)
    except (ValueError, OverflowError):
        raise malformed(path, "is not a time between the years 1 and 9999") from None


def _listed(request: pb.GetUsageRequest, project: str) -> str:
    same = pb.GetUsageRequest()
    same.CopyFrom(request)
    same.project = project
    for field in ("page_size", "page_token"):
        same.ClearField(field)
    return f"usage/{same.SerializeToString(deterministic=True).hex()}"
