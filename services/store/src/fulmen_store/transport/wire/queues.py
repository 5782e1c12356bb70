"""Queue statistics and fleet demand, from and to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration

from fulmen.errors import PermissionDenied
from fulmen.ids import ALL_PROJECTS, rollout_name
from fulmen.store.v1 import queue_service_pb2 as queue_pb
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1 import runner_registry_service_pb2 as registry_pb
from fulmen_service_kit.security.auth import current_caller
from fulmen_service_kit.security.tokens import Caller
from fulmen_store.malformed import malformed
from fulmen_store.runners.demand import Demand, DemandQuery
from fulmen_store.scheduling.fair_queue import Labels
from fulmen_store.scheduling.queue_watch import SeenQueue
from fulmen_store.scheduling.rules_codec import rules_message
from fulmen_store.scheduling.table import ListedQueue, QueueStats
from fulmen_store.transport.access import require_range

__all__ = [
    "OptionalNumber",
    "checked_query",
    "demand_message",
    "demand_project",
    "demand_query",
    "queue_message",
    "stats_message",
    "watched_message",
]

MAX_UNMATCHED = 100


def stats_message(
    stats: QueueStats, *, open_credit: int, unmatched: Iterable[tuple[Labels, int]]
) -> pb.GetQueueStatsResponse:
    """Encodes queue statistics; `unmatched` are label sets that no runner has, each with its waiting rollouts."""
    queue, terms = stats.queue, stats.queue.terms
    message = pb.GetQueueStatsResponse(
        queued_count=sum(each.queued for each in stats.priorities),
        running_count=sum(each.running for each in stats.priorities),
        delayed_count=sum(each.delayed for each in stats.priorities),
        runner_count=queue.runners,
        open_credit_count=open_credit,
        rules=rules_message(terms.rules),
        weight=round(terms.weight),
        max_running=terms.max_running,
        max_queued=terms.max_queued,
        pause_reason=queue.pause_reason,
    )
    if queue.paused_at is not None:
        message.pause_time.FromDatetime(queue.paused_at)
    ages = [each.oldest_age_s for each in stats.priorities if each.oldest_age_s is not None]
    if ages:
        _set(message.oldest_queued_age, max(ages))
    for each in stats.priorities:
        if each.queued:
            row = message.priorities.add(priority=each.priority, queued_count=each.queued)
            _set(row.oldest_queued_age, each.oldest_age_s or 0.0)
    for one in stats.task_types:
        task_type = message.task_types.add(task_type=one.task_type, sample_count=one.samples)
        _set(task_type.duration_p50, one.p50_s)
        _set(task_type.duration_p95, one.p95_s)
    most_first = sorted(unmatched, key=lambda one: (-one[1], sorted(one[0])))
    for labels, count in most_first[:MAX_UNMATCHED]:
        message.unmatched.add(labels=_pairs(labels), queued_count=count)
    for paused in stats.paused_agents:
        names = [rollout_name(queue.project, rollout_id) for rollout_id in paused.rollouts]
        message.paused_agents.add(agent=paused.agent, rollouts=names).pause_time.FromDatetime(paused.paused_at)
    return message


def watched_message(seen: SeenQueue) -> queue_pb.WatchQueueStatsResponse:
    """Encodes a queue for its watchers."""
    message = queue_pb.WatchQueueStatsResponse(
        stats=stats_message(seen.stats, open_credit=seen.open_credit, unmatched=seen.unmatched)
    )
    for each in seen.stats.labels:
        if each.queued or each.running:
            message.backlog.add(labels=_pairs(each.labels), queued_count=each.queued, running_count=each.running)
    return message


def queue_message(queue: ListedQueue) -> queue_pb.Queue:
    """Encodes a queue beside others."""
    terms = queue.terms
    message = queue_pb.Queue(
        project=queue.project,
        queued_count=queue.queued,
        running_count=queue.running,
        weight=round(terms.share),
        max_running=terms.max_running,
        max_queued=terms.max_queued,
        pause_reason=queue.pause_reason,
    )
    if queue.paused_at is not None:
        message.pause_time.FromDatetime(queue.paused_at)
    return message


def _pairs(labels: Labels) -> dict[str, str]:
    return dict(label.split("=", 1) for label in sorted(labels))


def _set(field: Duration, seconds: float) -> None:
    field.FromNanoseconds(max(0, round(seconds * 1e9)))


MAX_FORECAST_S: Final = 3600
DAY_S: Final = 86_400.0


MIN_DURATION_S: Final = 0.001


MAX_SLOTS: Final = 10_000


MAX_RUNNERS: Final = 10_000


MAX_LABELS: Final = 64


MAX_NAME: Final = 128


DEFAULTS: Final = DemandQuery()


def demand_project(name: str, caller: Caller) -> str | None:
    """Returns the project to count, by default the caller's; None for all.

    Raises:
        PermissionDenied: If the caller is bound to another project.
    """
    project = name or caller.project
    if not caller.may_access(project):
        raise PermissionDenied("The token belongs to another project.", role=caller.role, project=project[:MAX_NAME])
    return None if project == ALL_PROJECTS else project


OptionalNumber = tuple[str, float | None]
"""Name of a number in errors, and its value; None for the default."""


def checked_query(
    *,
    project: str | None,
    labels: Mapping[str, str],
    target_drain_s: OptionalNumber,
    slots_per_runner: OptionalNumber,
    default_duration_s: OptionalNumber,
    forecast_s: OptionalNumber,
    min_runners: int = DEFAULTS.min_runners,
    max_runners: int = DEFAULTS.max_runners,
) -> DemandQuery:
    """Builds a query from optional values.

    Raises:
        ArgumentInvalid: If a value is out of range.
    """
    drain_s = _in_range(target_drain_s, DEFAULTS.target_drain_s, 1, DAY_S)
    slots = _in_range(slots_per_runner, DEFAULTS.slots_per_runner, 1, MAX_SLOTS)
    duration_s = _in_range(default_duration_s, DEFAULTS.default_duration_s, MIN_DURATION_S, DAY_S)
    ahead_s = _in_range(forecast_s, DEFAULTS.forecast_s, 0, MAX_FORECAST_S)
    require_range("labels", len(labels), 0, MAX_LABELS)
    require_range("min_runners", min_runners, 0, MAX_RUNNERS)
    require_range("max_runners", max_runners, 1, MAX_RUNNERS)
    if min_runners > max_runners:
        raise malformed("min_runners", "is greater than max_runners")
    if slots != int(slots):
        raise malformed(slots_per_runner[0], "is not an integer")
    return DemandQuery(
        project=project,
        labels=frozenset(f"{key}={value}" for key, value in labels.items()),
        target_drain_s=drain_s,
        slots_per_runner=int(slots),
        default_duration_s=duration_s,
        min_runners=min_runners,
        max_runners=max_runners,
        forecast_s=ahead_s,
    )


def _in_range(number: OptionalNumber, default: float, low: float, high: float) -> float:
    name, given = number
    value = default if given is None else given
    require_range(name, value, low, high)
    return value


def demand_query(request: registry_pb.GetFleetDemandRequest) -> DemandQuery:
    """Decodes a request.

    Raises:
        ArgumentInvalid: If a value is out of range.
        PermissionDenied: If the caller is bound to another project.
    """
    return checked_query(
        project=demand_project(request.project, current_caller()),
        labels=dict(request.labels),
        target_drain_s=_duration(request, "target_drain"),
        slots_per_runner=("slots_per_runner", request.slots_per_runner or None),
        default_duration_s=_duration(request, "default_duration"),
        forecast_s=_duration(request, "forecast_horizon"),
        min_runners=request.min_runners,
        max_runners=request.max_runners or MAX_RUNNERS,
    )


def demand_message(demand: Demand, age_s: float) -> registry_pb.GetFleetDemandResponse:
    """Encodes the demand; `age_s` is the age of its counts, seconds."""
    message = registry_pb.GetFleetDemandResponse(
        desired_runner_count=demand.runners,
        desired_slot_count=demand.slots,
        queued_count=demand.queued,
        running_count=demand.running,
    )
    message.predicted_work.FromNanoseconds(round(demand.predicted_work_s * 1e9))
    message.age.FromNanoseconds(round(age_s * 1e9))
    if demand.forecast_slots is not None:
        message.forecast_slot_count = demand.forecast_slots
    if demand.errors is not None:
        message.forecast_error, message.naive_forecast_error = demand.errors.forecast, demand.errors.naive
    return message


def _duration(request: registry_pb.GetFleetDemandRequest, name: str) -> OptionalNumber:
    duration: Duration = getattr(request, name)
    return name, duration.seconds + duration.nanos / 1e9 if request.HasField(name) else None
