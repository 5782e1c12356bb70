"""Queue statistics to protobuf."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration

from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.scheduling.fair_queue import Labels
from fulmen_store.scheduling.rules_codec import rules_message
from fulmen_store.scheduling.table import QueueStats

__all__ = ["stats_message"]

MAX_UNMATCHED = 100


def stats_message(
    stats: QueueStats, *, open_credit: int, unmatched: Iterable[tuple[Labels, int]]
) -> pb.GetQueueStatsResponse:
    """Writes how full a queue is; `unmatched` are label sets that no runner has, and how many wait for them."""
    terms = stats.terms
    message = pb.GetQueueStatsResponse(
        queued_count=sum(each.queued for each in stats.priorities),
        running_count=sum(each.running for each in stats.priorities),
        delayed_count=sum(each.delayed for each in stats.priorities),
        runner_count=stats.runners,
        open_credit_count=open_credit,
        rules=rules_message(terms.rules),
        weight=round(terms.weight),
        max_running=terms.max_running,
        max_queued=terms.max_queued,
    )
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
        pairs = dict(label.split("=", 1) for label in labels)
        message.unmatched.add(labels=pairs, queued_count=count)
    return message


def _set(field: Duration, seconds: float) -> None:
    field.FromNanoseconds(max(0, round(seconds * 1e9)))
