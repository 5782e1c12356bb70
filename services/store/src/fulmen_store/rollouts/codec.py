"""Requests to create rollouts, from protobuf."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.ids import rollout_name
from fulmen.store.v1 import rollout_pb2
from fulmen_store.database.stored import read_column
from fulmen_store.malformed import malformed
from fulmen_store.rollouts.records import RolloutView
from fulmen_store.rollouts.requests import CHANGEABLE, NONE, RETRY_OF, NewRollout, RolloutChange

__all__ = [
    "changed_rollout",
    "new_rollout",
    "repeated_rollout",
    "rollout_change",
]


DEFAULTS = NewRollout(request=b"")
OUTPUT_ONLY = (
    "name", "state", "failure_kind", "failure_message", "create_time", "end_time", "attempts", "ended_attempt_count",
    "reward", "duration", "prompt_token_count", "completion_token_count", "cost_micros", "input_start",
)  # fmt: skip


def new_rollout(message: rollout_pb2.Rollout) -> NewRollout:
    """Decodes a rollout to create; sets the message's unset fields to their defaults."""
    name = message.name
    for field in OUTPUT_ONLY:
        message.ClearField(field)
    message.project = message.project or DEFAULTS.project
    message.group_size = message.group_size or DEFAULTS.group_size
    message.mode = message.mode or cast("rollout_pb2.RolloutMode", DEFAULTS.mode)
    message.input_content_type = message.input_content_type or DEFAULTS.content_type
    policy = message.policy
    policy.max_attempts = policy.max_attempts or DEFAULTS.max_attempts
    if not policy.HasField("attempt_timeout"):
        policy.attempt_timeout.FromMilliseconds(DEFAULTS.timeout_ms)
    if not policy.HasField("retry_backoff"):
        policy.retry_backoff.FromMilliseconds(DEFAULTS.backoff_ms)
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
        agent_name=message.agent,
        resource_versions=dict(message.resource_versions) if message.resource_versions else NONE,
        priority=message.priority,
        not_before=_moment(message, "not_before_time", at="rollouts[]"),
        required_labels=dict(message.required_labels) if message.required_labels else NONE,
        metadata=dict(message.metadata) if message.metadata else NONE,
        max_attempts=policy.max_attempts,
        attempt_timeout_s=policy.attempt_timeout.seconds + policy.attempt_timeout.nanos / 1e9,
        retry_on=list(policy.retry_on),
        retry_backoff_s=policy.retry_backoff.seconds + policy.retry_backoff.nanos / 1e9,
        task_type_name=message.task_type,
        deadline=_moment(message, "deadline_time", at="rollouts[]"),
        hedged=policy.hedged,
        model_token_budget=policy.model_token_budget,
        timeout_quantile=policy.attempt_timeout_quantile,
        timeout_factor=policy.attempt_timeout_factor,
    )


def repeated_rollout(view: RolloutView) -> NewRollout | None:
    """Returns the request that runs a final rollout again, in a group of one; None if what is stored is unreadable."""
    message = read_column(rollout_pb2.Rollout, view.request)
    if message is None:
        return None
    message.metadata[RETRY_OF] = rollout_name(message.project, view.rollout_id)
    for field in ("group_id", "group_size", "not_before_time", "deadline_time"):
        message.ClearField(field)
    return replace(new_rollout(message), retry_of=view.rollout_id)


def rollout_change(message: rollout_pb2.Rollout, paths: Sequence[str]) -> RolloutChange:
    """Decodes a change: the fields that the paths name, or those that are set if there are none."""
    given = frozenset(paths) or CHANGEABLE & {field.name for field, _ in message.ListFields()}
    deadline = _moment(message, "deadline_time", at="rollout")
    return RolloutChange(paths=given, values=NewRollout(request=b"", priority=message.priority, deadline=deadline))


def changed_rollout(request: bytes, change: RolloutChange) -> NewRollout | None:
    """Returns a stored request as changed; None if what is stored is unreadable."""
    message = read_column(rollout_pb2.Rollout, request)
    if message is None:
        return None
    if change.changes("priority"):
        message.priority = change.values.priority
    if change.changes("deadline_time"):
        message.ClearField("deadline_time")
        if change.values.deadline is not None:
            message.deadline_time.FromDatetime(change.values.deadline)
    return new_rollout(message)


def _moment(message: rollout_pb2.Rollout, field: str, *, at: str) -> datetime.datetime | None:
    if not message.HasField(field):
        return None
    value: Timestamp = getattr(message, field)
    try:
        return value.ToDatetime(tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        raise malformed(f"{at}.{field}", "is not a time between the years 1 and 9999") from None
