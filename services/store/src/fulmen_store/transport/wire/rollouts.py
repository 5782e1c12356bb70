"""Rollouts, attempts, assignments, the completion feed and changes as messages."""

from __future__ import annotations

import datetime
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import islice
from typing import Final, cast

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.ids import attempt_of, parse_attempt_name, rollout_name, runner_name
from fulmen.store.v1 import attempt_pb2, lease_pb2, rollout_changes_pb2, rollout_pb2
from fulmen.store.v1 import rollout_selection_pb2 as selection_pb
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.rpc.message_sizes import MESSAGE_BYTES
from fulmen_service_kit.security.call_terms import CallTerms
from fulmen_service_kit.security.tokens import TokenSigner
from fulmen_store.database.stored import UNREADABLE, read_column
from fulmen_store.leases.codec import MAX_PRINTED_BYTES, MAX_PROGRESS_BYTES, MAX_REPORT_BYTES
from fulmen_store.leases.leases import Grant
from fulmen_store.rollouts.facets import Facet
from fulmen_store.rollouts.feed import FeedPage
from fulmen_store.rollouts.feed_cursor import Selection
from fulmen_store.rollouts.lists import RolloutCounts
from fulmen_store.rollouts.records import AttemptView, RolloutView, RunningAttempt
from fulmen_store.rollouts.requests import MAX_STORED_BYTES, RETRY_OF
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.rollouts.transitions import FINAL_STATES, FailureKind
from fulmen_store.rollouts.watch import ChangePage, ChangeSelection
from fulmen_store.scheduling.durations import DurationTracker

__all__ = [
    "add_printed",
    "attempt_message",
    "change_messages",
    "counts_message",
    "created_rollout",
    "feed_messages",
    "finished_rollout",
    "rollout_of",
    "write_assignment",
]

FIGURES = ("reward", "prompt_token_count", "completion_token_count", "cost_micros")
MAX_START_CHARS = 200
KEY_MARGIN_S = 60.0
MIN_TIMEOUT_S = 0.001
MODE_CLAIMS: Mapping[int, str] = {
    rollout_pb2.ROLLOUT_MODE_TRAIN: "train",
    rollout_pb2.ROLLOUT_MODE_VALIDATION: "validation",
    rollout_pb2.ROLLOUT_MODE_TEST: "test",
}


def rollout_of(view: RolloutView, *, with_input: bool = True) -> rollout_pb2.Rollout:
    """Encodes a rollout without its ended attempts; its `failure_message` reports it if the stored request is
    unreadable."""
    stored = read_column(rollout_pb2.Rollout, view.request, max_bytes=MAX_STORED_BYTES)
    message = stored or rollout_pb2.Rollout(failure_message=UNREADABLE)
    message.project = view.project
    message.name = rollout_name(view.project, view.rollout_id)
    message.state = view.state.value
    message.failure_kind = view.failure_kind.value
    message.ended_attempt_count = view.ended_attempts
    _set(message.create_time, view.created_at)
    if view.ended_at is not None:
        _set(message.end_time, view.ended_at)
    if view.retry_at is not None:
        _set(message.retry_time, view.retry_at)
    if view.duration_s is not None:
        message.duration.FromNanoseconds(round(view.duration_s * 1e9))
    if view.failure_message:
        message.failure_message = view.failure_message
    for name in FIGURES:
        figure = getattr(view, name)
        if figure is not None:
            setattr(message, name, figure)
    if not with_input:
        message.input_start = _start_of(message.input)
        message.ClearField("input")
    return message


def _start_of(text: bytes) -> str:
    """Returns the beginning of a text in one line; empty if it is none."""
    # A character that is cut is left out.
    start = text[: 4 * MAX_START_CHARS].decode(errors="replace").rstrip("\ufffd")
    return "" if "\ufffd" in start else " ".join(start.split())[:MAX_START_CHARS]


def created_rollout(view: RolloutView) -> rollout_pb2.Rollout:
    """Encodes the part of a rollout in the answer to a creation: its name, its state, and the rollout that it
    retries."""
    state = cast("rollout_pb2.RolloutState", view.state.value)
    message = rollout_pb2.Rollout(name=rollout_name(view.project, view.rollout_id), state=state)
    again = rollout_of(view).metadata.get(RETRY_OF)
    if again is not None:
        message.metadata[RETRY_OF] = again
    return message


def finished_rollout(view: RolloutView, *, with_bodies: bool = True) -> rollout_pb2.Rollout:
    """Encodes a rollout with its latest attempts, oldest first; the view has the ended ones.

    Without bodies, its input and the outputs of its attempts are left out.
    """
    message = rollout_of(view, with_input=with_bodies)
    attempts: list[AttemptView | RunningAttempt] = [*view.ended, *view.running]
    # A second attempt may have ended before the first.
    for attempt in sorted(attempts, key=lambda each: each.number):
        name = attempt_of(message.name, attempt.number)
        message.attempts.append(
            attempt_message(attempt, name) if isinstance(attempt, AttemptView) else _running(attempt, name)
        )
        if not with_bodies:
            message.attempts[-1].ClearField("output")
    return message


def add_printed(rollout: rollout_pb2.Rollout, printed: Mapping[int, bytes]) -> None:
    """Adds the stored ends of what agents printed, by the numbers of attempts; an unreadable one is reported as
    such."""
    for attempt in rollout.attempts:
        stored = printed.get(parse_attempt_name(attempt.name).number)
        if stored is not None:
            tail = read_column(attempt_pb2.PrintedTail, stored, max_bytes=MAX_PRINTED_BYTES)
            attempt.printed.CopyFrom(tail or attempt_pb2.PrintedTail(stderr=UNREADABLE))


def counts_message(counts: RolloutCounts, facets: Sequence[Facet] = ()) -> selection_pb.CountRolloutsResponse:
    """Encodes numbers of rollouts, ordered by state and failure kind, and facets."""
    message = selection_pb.CountRolloutsResponse(count=sum(counts.parts.values()), has_more=counts.has_more)
    for (state, kind), count in sorted(counts.parts.items()):
        message.parts.add(state=state.value, failure_kind=kind.value, count=count)
    for facet in facets:
        shown = message.facets.add(
            field=facet.field,
            has_more_values=facet.has_more_values,
            examined_count=facet.examined,
            has_more=facet.has_more,
        )
        for one in facet.values:
            shown.values.add(value=one.value, filter=one.filter, count=one.count)
    return message


def write_assignment(
    message: lease_pb2.Assignment, grant: Grant, signer: TokenSigner, durations: DurationTracker
) -> float | None:
    """Encodes an assignment with the attempt key for model calls and spans.

    Returns what the durations of its task type bound the attempt to, seconds; None if nothing, or its timeout is shorter.

    Raises:
        DecodeError: If the stored request is unreadable.
    """
    if len(grant.request) > MAX_STORED_BYTES:
        raise DecodeError
    lease_id, epoch = str(grant.session_id), grant.epoch
    rollout = message.rollout
    rollout.ParseFromString(grant.request)
    rollout.name = name = rollout_name(rollout.project, grant.rollout_id)
    message.attempt = attempt = attempt_of(name, epoch)
    message.lease_id = lease_id
    message.epoch = epoch
    bound_s = _bound_s(rollout.policy, grant, durations)
    timeout_s = _time_to_run_s(rollout, bound_s, now_s=signer.clock())
    message.timeout.FromNanoseconds(round(timeout_s * 1e9))
    message.attempt_key = signer.attempt_key(
        attempt,
        project=rollout.project,
        lease_id=lease_id,
        epoch=epoch,
        mode=MODE_CLAIMS[rollout.mode],
        ttl_s=math.ceil(timeout_s) + KEY_MARGIN_S,
        terms=CallTerms(
            token_budget=rollout.policy.model_token_budget,
            training_run=rollout.training_run,
            agent=rollout.agent,
            continues=0 if rollout.policy.restart_lost else grant.continues,
        ),
    )
    return bound_s


def _bound_s(policy: rollout_pb2.RolloutPolicy, grant: Grant, durations: DurationTracker) -> float | None:
    if not policy.attempt_timeout_quantile or grant.task_type is None:
        return None
    known = durations.bound_s(grant.task_type, policy.attempt_timeout_quantile, policy.attempt_timeout_factor)
    return known if known is not None and known < _policy_s(policy) else None


def _policy_s(policy: rollout_pb2.RolloutPolicy) -> float:
    return policy.attempt_timeout.seconds + policy.attempt_timeout.nanos / 1e9


def _time_to_run_s(rollout: rollout_pb2.Rollout, bound_s: float | None, *, now_s: float) -> float:
    """Returns the time that an attempt may run: its bound or the policy's timeout, or the time to the deadline if shorter."""
    policy_s = _policy_s(rollout.policy) if bound_s is None else bound_s
    if not rollout.HasField("deadline_time"):
        return policy_s
    left_s = rollout.deadline_time.ToNanoseconds() / 1e9 - now_s
    return max(MIN_TIMEOUT_S, min(policy_s, left_s))


def _running(view: RunningAttempt, name: str) -> attempt_pb2.Attempt:
    message = attempt_pb2.Attempt(
        name=name, state=attempt_pb2.ATTEMPT_STATE_RUNNING, runner=runner_name(view.session_id), runner_host=view.host
    )
    _set(message.start_time, view.started_at)
    if view.progress and (
        stored := read_column(attempt_pb2.AttemptProgress, view.progress, max_bytes=MAX_PROGRESS_BYTES)
    ):
        message.progress.CopyFrom(stored)
    if view.timeout_ms is not None:
        message.timeout.FromMilliseconds(view.timeout_ms)
    return message


def attempt_message(view: AttemptView, name: str) -> attempt_pb2.Attempt:
    """Encodes an ended attempt; its `failure_message` reports it if the stored report is unreadable."""
    stored = read_column(attempt_pb2.Attempt, view.report, max_bytes=MAX_REPORT_BYTES)
    message = stored or attempt_pb2.Attempt(failure_message=UNREADABLE)
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


READ_MEMBERS: Final = 256


READ_BYTES: Final = 4 * 1024 * 1024
# Of each, up to 16 reports are read: 2 MiB at most.
READ_CHANGED: Final = 16


async def feed_messages(
    page: FeedPage, selection: Selection, table: RolloutTable
) -> AsyncIterator[pb.WatchRolloutsResponse]:
    """Yields the messages of a page; reads more members when the messages of those before have been consumed.

    A group that is larger than a message is sent in parts, in consecutive messages; the last part has the cursor.
    """
    message, message_bytes = pb.WatchRolloutsResponse(), 0
    part, part_bytes = pb.FinishedGroup(), 0
    members = ((group, rollout_id) for group in page.groups for rollout_id in group.rollout_ids)
    waiting = list(islice(members, READ_MEMBERS))
    while waiting:
        views, read = await table.view_final([rollout_id for _, rollout_id in waiting], max_bytes=READ_BYTES)
        found = {view.rollout_id: view for view in views}
        for group, rollout_id in waiting[:read]:
            if rollout_id in found:
                member = finished_rollout(found[rollout_id])
                member_bytes = member.ByteSize()
                if part.rollouts and part_bytes + member_bytes > MESSAGE_BYTES:
                    part.group_id = part.group_id or part.rollouts[0].name
                    if message.groups:
                        yield message
                    yield pb.WatchRolloutsResponse(groups=[part])
                    message, message_bytes = pb.WatchRolloutsResponse(), 0
                    part, part_bytes = pb.FinishedGroup(group_id=part.group_id), 0
                part.rollouts.append(member)
                part_bytes += member_bytes
                part.group_id = part.group_id or member.group_id
                part.group_size = len(group.rollout_ids)
            if rollout_id == group.rollout_ids[-1] and (part.rollouts or part.group_id):
                part.group_id = part.group_id or part.rollouts[0].name
                part.cursor = group.cursor.encode(selection)
                if message.groups and message_bytes + part_bytes > MESSAGE_BYTES:
                    yield message
                    message, message_bytes = pb.WatchRolloutsResponse(), 0
                message.groups.append(part)
                message_bytes += part_bytes
                message.cursor = part.cursor
                part, part_bytes = pb.FinishedGroup(), 0
        waiting = [*waiting[read:], *islice(members, read)]
    message.cursor = page.cursor.encode(selection)
    yield message


async def change_messages(
    page: ChangePage, selection: ChangeSelection, table: RolloutTable
) -> AsyncIterator[rollout_changes_pb2.WatchRolloutChangesResponse]:
    """Yields the messages of a page of changes; reads more rollouts when the messages of those before have been consumed."""
    message, message_bytes = rollout_changes_pb2.WatchRolloutChangesResponse(), 0
    for start in range(0, len(page.changes), READ_CHANGED):
        cursors = {change.cursor.rollout_id: change.cursor for change in page.changes[start : start + READ_CHANGED]}
        for view in await table.view(list(cursors), with_usage=True, with_attempts=True):
            rollout = finished_rollout(view, with_bodies=False)
            rollout_bytes = rollout.ByteSize()
            if message.rollouts and message_bytes + rollout_bytes > MESSAGE_BYTES:
                yield message
                message, message_bytes = rollout_changes_pb2.WatchRolloutChangesResponse(), 0
            message.rollouts.append(rollout)
            message.cursor = cursors[view.rollout_id].encode(selection)
            message_bytes += rollout_bytes
    message.cursor = page.cursor.encode(selection)
    yield message
