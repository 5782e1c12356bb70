"""Rollouts, attempts, assignments and the completion feed as messages."""

from __future__ import annotations

import datetime
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.ids import attempt_of, rollout_name, runner_name
from fulmen.store.v1 import attempt_pb2, lease_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.security.tokens import TokenSigner
from fulmen_store.database.stored import UNREADABLE, read_column
from fulmen_store.leases.leases import Grant
from fulmen_store.rollouts.feed import FeedPage, FinishedGroup
from fulmen_store.rollouts.feed_cursor import Selection
from fulmen_store.rollouts.records import AttemptView, RolloutView, RunningAttempt
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.rollouts.transitions import FINAL_STATES, FailureKind

__all__ = [
    "feed_messages",
    "finished_rollout",
    "rollout_of",
    "write_assignment",
]

FIGURES = ("reward", "prompt_token_count", "completion_token_count", "cost_micros")
KEY_MARGIN_S = 60.0
MIN_TIMEOUT_S = 0.001
MODE_CLAIMS: Mapping[int, str] = {
    rollout_pb2.ROLLOUT_MODE_TRAIN: "train",
    rollout_pb2.ROLLOUT_MODE_VALIDATION: "validation",
    rollout_pb2.ROLLOUT_MODE_TEST: "test",
}


def rollout_of(view: RolloutView, *, with_input: bool = True) -> rollout_pb2.Rollout:
    """Encodes a rollout without its ended attempts; its `failure_message` says so if the stored request is unreadable."""
    message = read_column(rollout_pb2.Rollout, view.request) or rollout_pb2.Rollout(failure_message=UNREADABLE)
    message.project = view.project
    message.name = rollout_name(view.project, view.rollout_id)
    message.state = view.state.value
    message.failure_kind = view.failure_kind.value
    message.ended_attempt_count = view.ended_attempts
    _set(message.create_time, view.created_at)
    if view.ended_at is not None:
        _set(message.end_time, view.ended_at)
    if view.duration_s is not None:
        message.duration.FromNanoseconds(round(view.duration_s * 1e9))
    if view.failure_message:
        message.failure_message = view.failure_message
    for name in FIGURES:
        figure = getattr(view, name)
        if figure is not None:
            setattr(message, name, figure)
    if not with_input:
        message.ClearField("input")
    return message


def finished_rollout(view: RolloutView) -> rollout_pb2.Rollout:
    """Encodes a rollout with its attempts, oldest first; the view has the ended ones."""
    message = rollout_of(view)
    message.ended_attempt_count = len(view.ended)
    attempts: list[AttemptView | RunningAttempt] = [*view.ended, *view.running]
    # A second attempt may have ended before the first.
    for attempt in sorted(attempts, key=lambda each: each.number):
        name = attempt_of(message.name, attempt.number)
        message.attempts.append(_ended(attempt, name) if isinstance(attempt, AttemptView) else _running(attempt, name))
    return message


def write_assignment(message: lease_pb2.Assignment, grant: Grant, signer: TokenSigner) -> None:
    """Encodes an assignment with the attempt key for model calls and spans.

    Raises:
        DecodeError: If the stored request is unreadable.
    """
    lease_id, epoch = str(grant.session_id), grant.epoch
    rollout = message.rollout
    rollout.ParseFromString(grant.request)
    rollout.name = name = rollout_name(rollout.project, grant.rollout_id)
    message.attempt = attempt = attempt_of(name, epoch)
    message.lease_id = lease_id
    message.epoch = epoch
    timeout_s = _time_to_run_s(rollout, now_s=signer.clock())
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


def _time_to_run_s(rollout: rollout_pb2.Rollout, *, now_s: float) -> float:
    """Returns the time that an attempt may run: the policy's timeout, or the time to the deadline if it is shorter."""
    policy_s = rollout.policy.attempt_timeout.seconds + rollout.policy.attempt_timeout.nanos / 1e9
    if not rollout.HasField("deadline_time"):
        return policy_s
    left_s = rollout.deadline_time.ToNanoseconds() / 1e9 - now_s
    return max(MIN_TIMEOUT_S, min(policy_s, left_s))


def _running(view: RunningAttempt, name: str) -> attempt_pb2.Attempt:
    message = attempt_pb2.Attempt(
        name=name, state=attempt_pb2.ATTEMPT_STATE_RUNNING, runner=runner_name(view.session_id), runner_host=view.host
    )
    _set(message.start_time, view.started_at)
    return message


def _ended(view: AttemptView, name: str) -> attempt_pb2.Attempt:
    message = read_column(attempt_pb2.Attempt, view.report) or attempt_pb2.Attempt(failure_message=UNREADABLE)
    message.name = name
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


MESSAGE_BYTES: Final = 1024 * 1024


BATCH_MEMBERS: Final = 256


async def feed_messages(
    page: FeedPage, selection: Selection, table: RolloutTable
) -> AsyncIterator[pb.WatchRolloutsResponse]:
    """Yields the messages of a page; reads a batch when the messages of the previous one have been consumed."""
    message, size_bytes = pb.WatchRolloutsResponse(), 0
    for batch in _batches(page.groups):
        for finished in await _read(batch, selection, table):
            size_bytes += finished.ByteSize()
            if message.groups and size_bytes > MESSAGE_BYTES:
                yield message
                message, size_bytes = pb.WatchRolloutsResponse(), finished.ByteSize()
            message.groups.append(finished)
            message.cursor = finished.cursor
    message.cursor = page.cursor.encode(selection)
    yield message


def _batches(groups: Sequence[FinishedGroup]) -> Iterator[list[FinishedGroup]]:
    """Splits groups into batches with few members; a large group is a batch by itself."""
    batch: list[FinishedGroup] = []
    members = 0
    for group in groups:
        members += len(group.rollout_ids)
        if batch and members > BATCH_MEMBERS:
            yield batch
            batch, members = [], len(group.rollout_ids)
        batch.append(group)
    if batch:
        yield batch


async def _read(groups: Sequence[FinishedGroup], selection: Selection, table: RolloutTable) -> list[pb.FinishedGroup]:
    ids = [rollout_id for group in groups for rollout_id in group.rollout_ids]
    views = {view.rollout_id: view for view in await table.view_final(ids)}
    read = []
    for group in groups:
        members = [finished_rollout(views[rollout_id]) for rollout_id in group.rollout_ids]
        read.append(
            pb.FinishedGroup(
                group_id=members[0].group_id or members[0].name,
                rollouts=members,
                cursor=group.cursor.encode(selection),
            )
        )
    return read
