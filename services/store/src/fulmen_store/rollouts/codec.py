"""Requests to create rollouts, from protobuf."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import DEFAULT_PROJECT, rollout_name
from fulmen.store.v1 import rollout_pb2
from fulmen_store.rollouts.records import RolloutView
from fulmen_store.rollouts.requests import RETRY_OF, NewRollout

__all__ = [
    "new_rollout",
    "repeated_rollout",
]

DEFAULT_MAX_ATTEMPTS = 3


DEFAULT_TIMEOUT_S = 900


DEFAULT_BACKOFF_S = 1


DEFAULT_CONTENT_TYPE = "application/json"


NONE: Mapping[str, str] = {}


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


def _moment(field: Timestamp, *, path: str) -> datetime.datetime:
    try:
        return field.ToDatetime(tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        problem = Violation(field=f"rollouts[].{path}", description="is not a time between the years 1 and 9999")
        raise ArgumentInvalid("The rollouts cannot be created.", violations=[problem]) from None
