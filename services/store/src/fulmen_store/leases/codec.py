"""Reports of ended attempts, from and to protobuf."""

from __future__ import annotations

from functools import lru_cache
from uuid import UUID

from fulmen.ids import AttemptName
from fulmen.store.v1 import attempt_pb2, lease_pb2
from fulmen_store.leases.attempt_results import MAX_MESSAGE_CHARS, RewardValue, result_problem
from fulmen_store.leases.leases import AttemptReport
from fulmen_store.rollouts.transitions import FailureKind

__all__ = [
    "explained",
    "report_of",
]

_KINDS = {kind.value: kind for kind in FailureKind}


def explained(text: str) -> bytes:
    """Encodes the stored report of an attempt that the store ended."""
    return attempt_pb2.Attempt(failure_message=text).SerializeToString(deterministic=True)


def report_of(result: lease_pb2.AttemptResult, attempt: AttemptName, *, project_id: int) -> AttemptReport | str:
    """Decodes a runner's report of an attempt; returns a description of the problem if it is malformed."""
    rewards = [
        RewardValue(
            dimension=reward.dimension or "reward",
            value=reward.value,
            step=reward.step if reward.HasField("step") else None,
            span_id=reward.span_id,
        )
        for reward in result.rewards
    ]
    problem = result_problem(kind=result.failure_kind, rewards=rewards, output_size=len(result.output))
    if problem:
        return problem
    if attempt.number != result.epoch:
        return "epoch is not that of the assignment"
    session_id = _session_id(result.lease_id)
    if session_id is None:
        return "lease_id is not that of the assignment"
    report = attempt_pb2.Attempt(
        failure_message=result.failure_message[-MAX_MESSAGE_CHARS:],
        rewards=result.rewards,
        output=result.output,
        output_content_type=result.output_content_type,
    )
    for reward in report.rewards:
        if not reward.dimension:
            reward.dimension = "reward"
    return AttemptReport(
        project_id=project_id,
        rollout_id=attempt.rollout_id,
        session_id=session_id,
        epoch=attempt.number,
        kind=_KINDS[result.failure_kind],
        report=report.SerializeToString(deterministic=True),
    )


@lru_cache(maxsize=4096)
def _session_id(lease_id: str) -> UUID | None:
    try:
        return UUID(lease_id)
    except ValueError:
        return None
