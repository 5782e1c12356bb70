"""What several workers see of the backends, as one answer."""

from __future__ import annotations

from collections.abc import Sequence

from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2
from fulmen_llm_proxy.workers.siblings import combined_instance

_BY_URGENCY = (
    backend_pb2.BREAKER_STATE_CLOSED,
    backend_pb2.BREAKER_STATE_HALF_OPEN,
    backend_pb2.BREAKER_STATE_OPEN,
)


def combined_health(
    answers: Sequence[backend_service_pb2.GetBackendHealthResponse],
) -> backend_service_pb2.GetBackendHealthResponse:
    """Adds up what the workers say of each backend; one of them may not have heard of a new backend yet."""
    seen: dict[str, list[backend_pb2.BackendHealth]] = {}
    for answer in answers:
        for health in answer.backends:
            seen.setdefault(health.name, []).append(health)
    own, *others = (answer.instance_id for answer in answers)
    return backend_service_pb2.GetBackendHealthResponse(
        backends=[_combined(seen[name]) for name in sorted(seen)], instance_id=combined_instance(own, others)
    )


def _combined(parts: Sequence[backend_pb2.BackendHealth]) -> backend_pb2.BackendHealth:
    combined = backend_pb2.BackendHealth(
        name=parts[0].name,
        healthy=all(part.healthy for part in parts),
        in_flight_count=sum(part.in_flight_count for part in parts),
        request_count=sum(part.request_count for part in parts),
        failure_count=sum(part.failure_count for part in parts),
        breaker=max((part.breaker for part in parts), key=_BY_URGENCY.index),
        waiting_count=sum(part.waiting_count for part in parts),
        engine_waiting_count=max(part.engine_waiting_count for part in parts),
        engine_cache_usage=max(part.engine_cache_usage for part in parts),
    )
    failed = [part for part in parts if part.HasField("last_failure_time")]
    if failed:
        last = max(failed, key=lambda part: part.last_failure_time.ToNanoseconds())
        combined.last_failure_time.CopyFrom(last.last_failure_time)
        combined.last_failure_kind = last.last_failure_kind
    return combined
