"""Rollouts and attempts between protobuf and the domain."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from uuid import UUID

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import DEFAULT_PROJECT, attempt_name, parse_attempt_name, rollout_name, runner_name
from fulmen.store.v1 import attempt_pb2, lease_pb2, rollout_pb2
from fulmen_service_kit.tokens import TokenSigner
from fulmen_store.leases.attempt_results import MAX_MESSAGE_CHARS, RewardValue, result_problem
from fulmen_store.leases.leases import AttemptReport, Grant
from fulmen_store.rollouts.records import RolloutView
from fulmen_store.rollouts.requests import RETRY_OF, NewRollout
from fulmen_store.rollouts.table import AttemptView
from fulmen_store.rollouts.transitions import FINAL_STATES, AttemptState, FailureKind

__all__ = [
    "explained",
    "finished_rollout",
    "new_rollout",
    "repeated_rollout",
    "report_of",
    "rollout_of",
    "write_assignment",
]

DEFAULT_MAX_ATTEMPTS = 3
DEFAULT_TIMEOUT_S = 900
DEFAULT_BACKOFF_S = 1
DEFAULT_CONTENT_TYPE = "application/json"
KEY_MARGIN_S = 60.0
NONE: Mapping[str, str] = {}
_KINDS = {kind.value: kind for kind in FailureKind}
MIN_TIMEOUT_S = 0.001
MODE_CLAIMS: Mapping[int, str] = {
    rollout_pb2.ROLLOUT_MODE_TRAIN: "train",
    rollout_pb2.ROLLOUT_MODE_VALIDATION: "validation",
    rollout_pb2.ROLLOUT_MODE_TEST: "test",
}
OUTPUT_ONLY = ("name", "state", "failure_kind", "create_time", "end_time", "attempts", "ended_attempt_count")


def new_rollout(message: rollout_pb2.Rollout) -> NewRollout:
    """Reads a rollout to create; fills the message's unset fields with their defaults."""
    name = message.name
    for field in OUTPUT_ONLY:
        message.ClearField(field)
    message.project = message.project or DEFAULT_PROJECT
    message.group_size = message.group_size or 1
    message.mode = message.mode or rollout_pb2.ROLLOUT_MODE_TRAIN
    message.input_content_type = message.input_content_type or DEFAULT_CONTENT_TYPE
    policy = message.policy
    policy.max_attempts = policy.max_attempts or DEFAULT_MAX_ATTEMPTS
    if not policy.HasField("attempt_timeout"):
        policy.attempt_timeout.seconds = DEFAULT_TIMEOUT_S
    if not policy.HasField("retry_backoff"):
        policy.retry_backoff.seconds = DEFAULT_BACKOFF_S
    return NewRollout(
        request=message.SerializeToString(deterministic=True),
        name=name,
        project=message.project,
        training_run=message.training_run,
        group_id=message.group_id,
        group_size=message.group_size,
        mode=message.mode,
        input_size=len(message.input),
        content_type=message.input_content_type,
        agent=message.agent,
        resource_versions=dict(message.resource_versions) if message.resource_versions else NONE,
        priority=message.priority,
        not_before=_moment(message.not_before_time, path="not_before_time")
        if message.HasField("not_before_time")
        else None,
        required_labels=dict(message.required_labels) if message.required_labels else NONE,
        metadata=dict(message.metadata) if message.metadata else NONE,
        max_attempts=policy.max_attempts,
        attempt_timeout_s=policy.attempt_timeout.seconds + policy.attempt_timeout.nanos / 1e9,
        retry_on=list(policy.retry_on),
        retry_backoff_s=policy.retry_backoff.seconds + policy.retry_backoff.nanos / 1e9,
        task_type=message.task_type,
        deadline=_moment(message.deadline_time, path="deadline_time") if message.HasField("deadline_time") else None,
        hedged=policy.hedged,
        model_token_budget=policy.model_token_budget,
    )


def repeated_rollout(view: RolloutView) -> NewRollout:
    """Makes the request of a rollout that runs a final one again; it is a group of its own."""
    message = rollout_pb2.Rollout.FromString(view.request)
    message.metadata[RETRY_OF] = rollout_name(view.rollout_id)
    for field in ("group_id", "group_size", "not_before_time", "deadline_time"):
        message.ClearField(field)
    return replace(new_rollout(message), retry_of=view.rollout_id)


def rollout_of(view: RolloutView, *, with_input: bool = True) -> rollout_pb2.Rollout:
    """Writes a rollout as it is now, without its ended attempts."""
    message = rollout_pb2.Rollout.FromString(view.request)
    message.name = rollout_name(view.rollout_id)
    message.state = view.state.value
    message.failure_kind = view.failure_kind.value
    message.ended_attempt_count = view.ended_attempts
    _set(message.create_time, view.created_at)
    if view.ended_at is not None:
        _set(message.end_time, view.ended_at)
    if not with_input:
        message.ClearField("input")
    return message


def finished_rollout(view: RolloutView, attempts: Sequence[AttemptView]) -> rollout_pb2.Rollout:
    """Writes a rollout with its attempts, oldest first."""
    message = rollout_of(view)
    message.ended_attempt_count = len(attempts)
    for attempt in attempts:
        message.attempts.append(_attempt(attempt))
    for live in view.running:
        running = message.attempts.add(
            name=attempt_name(view.rollout_id, live.number),
            state=AttemptState.RUNNING.value,
            runner=runner_name(live.session_id),
            runner_host=live.host,
        )
        _set(running.start_time, live.started_at)
    if view.running and attempts:
        # A hedged attempt may have ended before the one beside which it was started.
        message.attempts.sort(key=lambda each: parse_attempt_name(each.name).number)
    return message


def write_assignment(message: lease_pb2.Assignment, grant: Grant, signer: TokenSigner) -> None:
    """Writes an assignment, with the key that lets the agent call models and report spans."""
    lease_id, epoch = str(grant.session_id), grant.epoch
    rollout = message.rollout
    rollout.ParseFromString(grant.request)
    rollout.name = name = rollout_name(grant.rollout_id)
    message.attempt = attempt = f"{name}/attempts/{epoch}"
    message.lease_id = lease_id
    message.epoch = epoch
    timeout_s = _time_to_run_s(rollout)
    message.timeout.FromNanoseconds(round(timeout_s * 1e9))
    message.attempt_key = signer.attempt_key(
        attempt,
        project=rollout.project,
        lease_id=lease_id,
        epoch=epoch,
        mode=MODE_CLAIMS[rollout.mode],
        ttl_s=math.ceil(timeout_s) + KEY_MARGIN_S,
        token_budget=rollout.policy.model_token_budget,
    )


def _time_to_run_s(rollout: rollout_pb2.Rollout) -> float:
    """Returns how long an attempt may run from now: the policy's timeout, or less if the deadline is nearer.

    Only a hint to the runner, so the replica's clock will do; the store holds the deadline by the database's.
    """
    policy_s = rollout.policy.attempt_timeout.seconds + rollout.policy.attempt_timeout.nanos / 1e9
    if not rollout.HasField("deadline_time"):
        return policy_s
    left_s = rollout.deadline_time.ToNanoseconds() / 1e9 - time.time()
    return max(MIN_TIMEOUT_S, min(policy_s, left_s))


def explained(text: str) -> bytes:
    """Writes the stored report of an attempt that the store itself ended."""
    return attempt_pb2.Attempt(failure_message=text).SerializeToString(deterministic=True)


def report_of(result: lease_pb2.AttemptResult) -> AttemptReport | str:
    """Reads a runner's report; returns what is wrong with it if it is malformed.

    Raises:
        ArgumentInvalid: if the attempt's name is malformed.
    """
    attempt = parse_attempt_name(result.attempt, field="results[].attempt")
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


def _attempt(view: AttemptView) -> attempt_pb2.Attempt:
    message = attempt_pb2.Attempt.FromString(view.report)
    message.name = attempt_name(view.rollout_id, view.number)
    message.state = view.state.value
    message.failure_kind = view.failure_kind.value
    message.runner = runner_name(view.session_id)
    message.runner_host = view.host
    message.final = view.rollout_state in FINAL_STATES and view.failure_kind is not FailureKind.SUPERSEDED
    _set(message.start_time, view.started_at)
    _set(message.end_time, view.ended_at)
    return message


def _set(field: Timestamp, moment: datetime.datetime) -> None:
    field.FromDatetime(moment)


def _moment(field: Timestamp, *, path: str) -> datetime.datetime:
    try:
        return field.ToDatetime(tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        problem = Violation(field=f"rollouts[].{path}", description="is not a time between the years 1 and 9999")
        raise ArgumentInvalid("The rollouts cannot be created.", violations=[problem]) from None
