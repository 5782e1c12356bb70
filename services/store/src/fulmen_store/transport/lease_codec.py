"""Leases, acknowledgements and standings of attempts between protobuf and the domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast
from uuid import UUID

from fulmen.ids import attempt_name, parse_attempt_name
from fulmen.store.v1 import attempt_pb2, lease_pb2, rollout_pb2
from fulmen.store.v1 import lease_service_pb2 as pb
from fulmen_store.leases.attempt_checks import Standing
from fulmen_store.scheduling.runner_streams import Acknowledgement

__all__ = ["acks_of", "attempts_of", "names_of", "standing_message"]


def acks_of(answers: Sequence[Acknowledgement]) -> list[lease_pb2.CompletionAck]:
    """Writes what was done with reports."""
    return [
        lease_pb2.CompletionAck(
            attempt=answer.attempt,
            status=cast("lease_pb2.CompletionStatus", answer.status.value),
            message=answer.message,
        )
        for answer in answers
    ]


def names_of(attempts: Iterable[tuple[UUID, int]]) -> list[str]:
    """Formats names of attempts."""
    return [attempt_name(rollout_id, epoch) for rollout_id, epoch in attempts]


def attempts_of(names: Iterable[str], *, field: str) -> frozenset[tuple[UUID, int]]:
    """Takes names of attempts apart.

    Raises:
        ArgumentInvalid: if one is malformed.
    """
    parsed = [parse_attempt_name(name, field=field) for name in names]
    return frozenset((name.rollout_id, name.number) for name in parsed)


def standing_message(attempt: str, standing: Standing) -> pb.AttemptCheckResult:
    """Writes how an attempt stands."""
    return pb.AttemptCheckResult(
        attempt=attempt,
        status=cast("pb.AttemptStatus", standing.status.value),
        state=cast("attempt_pb2.AttemptState", standing.state or 0),
        project=standing.project,
        mode=cast("rollout_pb2.RolloutMode", standing.mode),
        current_epoch=standing.current_epoch,
    )
