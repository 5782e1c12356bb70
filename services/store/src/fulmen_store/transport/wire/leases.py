"""Leases, acknowledgements, attempt checks and runners as messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from fulmen.ids import attempt_name, parse_attempt_name, runner_name
from fulmen.store.v1 import attempt_pb2, lease_pb2, rollout_pb2
from fulmen.store.v1 import lease_service_pb2 as pb
from fulmen.store.v1 import runner_registry_service_pb2 as registry_pb
from fulmen_store.database.stored import read_column
from fulmen_store.leases.attempt_checks import CheckedAttempt
from fulmen_store.leases.leases import LeasedAttempt
from fulmen_store.projects.names import ProjectNames
from fulmen_store.runners.table import RunnerView
from fulmen_store.scheduling.runner_streams import Acknowledgement, RunnerOrdered
from fulmen_store.transport.access import require_range

__all__ = [
    "acks_of",
    "attempts_of",
    "has_labels",
    "names_of",
    "order_message",
    "packed_load",
    "runner_of",
    "check_result",
    "checked_labels",
]


def acks_of(answers: Sequence[Acknowledgement]) -> list[lease_pb2.CompletionAck]:
    """Encodes the outcomes of reports."""
    return [
        lease_pb2.CompletionAck(
            attempt=answer.attempt,
            status=cast("lease_pb2.CompletionStatus", answer.status.value),
            message=answer.message,
        )
        for answer in answers
    ]


def names_of(attempts: Iterable[LeasedAttempt], projects: ProjectNames) -> list[str]:
    """Formats names of attempts."""
    return [attempt_name(projects.name(project_id), rollout_id, epoch) for project_id, rollout_id, epoch in attempts]


async def attempts_of(names: Sequence[str], projects: ProjectNames, *, field: str) -> list[LeasedAttempt]:
    """Parses names of attempts; an unknown project becomes `NO_PROJECT`, which has no leases.

    Raises:
        ArgumentInvalid: If a name is malformed.
    """
    parsed = [parse_attempt_name(name, field=field) for name in names]
    numbers = await projects.find_all(name.project for name in parsed)
    return [LeasedAttempt(numbers[name.project], name.rollout_id, name.number) for name in parsed]


def check_result(attempt: str, checked: CheckedAttempt) -> pb.AttemptCheckResult:
    """Encodes the result of an attempt check."""
    return pb.AttemptCheckResult(
        attempt=attempt,
        status=cast("pb.AttemptStatus", checked.status.value),
        state=cast("attempt_pb2.AttemptState", checked.state or 0),
        project=checked.project,
        mode=cast("rollout_pb2.RolloutMode", checked.mode),
        current_epoch=checked.current_epoch,
        training_run=checked.training_run,
        agent=checked.agent,
    )


MAX_GPUS = 64


MAX_MODEL = 64


MAX_INFO_BYTES = 64 * 1024
MAX_HOST = 128
MAX_LABELS = 64
MAX_ADDRESS = 256
MAX_LOAD_BYTES = 32 * 1024


def packed_load(load: lease_pb2.RunnerLoad) -> bytes:
    """Encodes a runner's load; clamps values out of range.

    An invalid measurement must not make the renewal fail.
    """
    kept = lease_pb2.RunnerLoad(
        cpu_ratio=_ratio(load.cpu_ratio),
        memory_bytes=max(0, load.memory_bytes),
        memory_limit_bytes=max(0, load.memory_limit_bytes),
    )
    for gpu in load.gpus[:MAX_GPUS]:
        kept.gpus.add(
            model=gpu.model[:MAX_MODEL],
            utilization_ratio=_ratio(gpu.utilization_ratio),
            memory_bytes=max(0, gpu.memory_bytes),
            memory_limit_bytes=max(0, gpu.memory_limit_bytes),
        )
    if load.HasField("slots"):
        kept.slots.configured_count = max(0, load.slots.configured_count)
        kept.slots.in_use_count = max(0, load.slots.in_use_count)
        kept.slots.limit_count = max(0, load.slots.limit_count)
        kept.slots.automatic = load.slots.automatic
    return kept.SerializeToString(deterministic=True)


def checked_labels(info: lease_pb2.RunnerInfo) -> frozenset[str]:
    """Returns a runner's labels, `key=value`.

    Raises:
        ArgumentInvalid: If its description of itself is too large.
    """
    require_range("info.host", len(info.host), 0, MAX_HOST)
    require_range("info.labels", len(info.labels), 0, MAX_LABELS)
    require_range("info.address", len(info.address), 0, MAX_ADDRESS)
    require_range("info", info.ByteSize(), 0, MAX_INFO_BYTES)
    return frozenset(f"{key}={value}" for key, value in info.labels.items())


def runner_of(view: RunnerView) -> registry_pb.Runner:
    """Encodes a runner."""
    runner = registry_pb.Runner(
        name=runner_name(view.session_id),
        info=_info(view),
        running_count=view.running,
        attempts=view.attempts,
        ended_count=view.ended,
        failed_count=view.failed,
    )
    load = read_column(lease_pb2.RunnerLoad, view.load, max_bytes=MAX_LOAD_BYTES)
    if load is not None:
        runner.load.CopyFrom(load)
    for minute, packed in view.load_history:
        past = read_column(lease_pb2.RunnerLoad, packed, max_bytes=MAX_LOAD_BYTES)
        if past is not None:
            sample = runner.load_history.add(load=past)
            sample.minute_time.FromDatetime(minute)
    runner.project, runner.order_pending = view.project, view.is_order_pending
    if view.order is not None:
        runner.order.CopyFrom(order_message(view.order))
    runner.create_time.FromDatetime(view.opened_at)
    runner.lease_expire_time.FromDatetime(view.lease_until)
    return runner


def order_message(order: RunnerOrdered) -> lease_pb2.RunnerOrder:
    """Encodes a runner's orders."""
    message = lease_pb2.RunnerOrder(number=order.number)
    if order.slots is not None:
        message.slots.slot_count, message.slots.automatic = order.slots, not order.slots
    if order.drains:
        message.drain.SetInParent()
        if order.grace_s is not None:
            message.drain.grace.FromNanoseconds(round(order.grace_s * 1e9))
    return message


def has_labels(labels: Mapping[str, str]) -> Callable[[RunnerView], bool]:
    """Creates a filter for runners that have all these labels."""

    def wanted(view: RunnerView) -> bool:
        if not labels:
            return True
        own = _info(view).labels
        return all(key in own and own[key] == value for key, value in labels.items())

    return wanted


def _info(view: RunnerView) -> lease_pb2.RunnerInfo:
    return read_column(lease_pb2.RunnerInfo, view.info, max_bytes=MAX_INFO_BYTES) or lease_pb2.RunnerInfo()


def _ratio(value: float) -> float:
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0
