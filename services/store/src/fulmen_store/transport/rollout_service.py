"""`RolloutService` over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from uuid import UUID

import grpc.aio

from fulmen.errors import ArgumentInvalid, Draining, RolloutNotFound, Violation
from fulmen.ids import RolloutName, attempt_of, parse_rollout_name, parse_training_run_name, rollout_name
from fulmen.store.v1 import rollout_changes_pb2, rollout_pb2, rollout_service_pb2_grpc
from fulmen.store.v1 import rollout_comparison_pb2 as comparison_pb
from fulmen.store.v1 import rollout_selection_pb2 as selection_pb
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.rpc.message_sizes import fitting
from fulmen_service_kit.security.auth import current_caller, require_project
from fulmen_store.malformed import malformed, malformed_request, noted
from fulmen_store.rollouts.changes import QueueChanges
from fulmen_store.rollouts.codec import new_rollout, rollout_change
from fulmen_store.rollouts.dead_letters import DeadLetters
from fulmen_store.rollouts.deletion import Deletion
from fulmen_store.rollouts.feed import FeedFollower
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.rollouts.filter import Expression
from fulmen_store.rollouts.filter_parser import parse_filter
from fulmen_store.rollouts.records import NO_RUN, RolloutView
from fulmen_store.rollouts.requests import group_key_of
from fulmen_store.rollouts.rollouts import Rollouts
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.rollouts.watch import ChangeFollower, ChangeSelection
from fulmen_store.run_leases.run_leases import RunFence
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.queue_stats import StatsCache
from fulmen_store.transport.access import is_own_attempt, require_count, run_fence, run_project
from fulmen_store.transport.comparison import RolloutComparison
from fulmen_store.transport.in_order import answered_in_order
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.rollout_lists import ListRequests
from fulmen_store.transport.wire.queues import stats_message
from fulmen_store.transport.wire.rollouts import (
    add_printed,
    attempt_message,
    change_messages,
    created_rollout,
    feed_messages,
    finished_rollout,
)

__all__ = ["RolloutService"]

MAX_NAMES = 1000
ALL = "*"
CREATIONS_IN_FLIGHT = 256
DEFAULT_PAGE = 50
ID_BYTES = 16
NUMBER_BYTES = 4
MAX_ATTEMPTS = 64


class RolloutService(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Serves the queue and the completion feed."""

    def __init__(
        self,
        *,
        rollouts: Rollouts,
        changes: QueueChanges,
        deletion: Deletion,
        table: RolloutTable,
        lists: ListRequests,
        comparison: RolloutComparison,
        dead_letters: DeadLetters,
        feed: FeedFollower,
        watch: ChangeFollower,
        dispatcher: Dispatcher,
        stats: StatsCache,
        stopping: asyncio.Event,
    ) -> None:
        """Creates the servicer; `stopping` is set when the replica shuts down."""
        self._rollouts = rollouts
        self._changes = changes
        self._deletion = deletion
        self._table = table
        self._lists = lists
        self._comparison = comparison
        self._dead_letters = dead_letters
        self._feed = feed
        self._watch = watch
        self._dispatcher = dispatcher
        self._stats = stats
        self._stopping = stopping

    async def BatchCreateRollouts(
        self, request: pb.BatchCreateRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> pb.BatchCreateRolloutsResponse:
        """Creates rollouts, all or none."""
        fence = run_fence(request)
        return pb.BatchCreateRolloutsResponse(
            rollouts=await self._create(request.rollouts, request.request_id, fence=fence)
        )

    def StreamCreateRollouts(
        self, request_iterator: AsyncIterator[pb.StreamCreateRolloutsRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StreamCreateRolloutsResponse]:
        """Creates rollouts over a stream, one commit per request."""

        async def answer(request: pb.StreamCreateRolloutsRequest) -> pb.StreamCreateRolloutsResponse:
            return pb.StreamCreateRolloutsResponse(rollouts=await self._create(request.rollouts, request.request_id))

        return answered_in_order(request_iterator, answer, in_flight=CREATIONS_IN_FLIGHT)

    async def GetRollout(
        self, request: pb.GetRolloutRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetRolloutResponse:
        """Returns one rollout with its attempts."""
        (view,) = await self._views([parse_rollout_name(request.name)], in_full=True)
        rollout = finished_rollout(view)
        if request.with_printed:
            add_printed(rollout, await self._table.printed(view.rollout_id))
        return pb.GetRolloutResponse(rollout=rollout)

    async def ListAttempts(
        self, request: pb.ListAttemptsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAttemptsResponse:
        """Lists the ended attempts of a rollout, oldest first."""
        name = parse_rollout_name(request.parent, field="parent")
        limit = min(page_size(request.page_size, default=DEFAULT_PAGE), MAX_ATTEMPTS)
        listed = f"attempts/{name}"
        last = decode_token(request.page_token, listed=listed, key_bytes=NUMBER_BYTES)
        await self._views([name])
        after = 0 if last is None else int.from_bytes(last)
        views = await self._table.attempts(name.rollout_id, after=after, limit=limit + 1)
        shown = fitting(attempt_message(view, attempt_of(str(name), view.number)) for view in views[:limit])
        more = len(shown) < len(views)
        key = views[len(shown) - 1].number.to_bytes(NUMBER_BYTES) if more else None
        return pb.ListAttemptsResponse(
            attempts=shown, next_page_token="" if key is None else encode_token(key, listed=listed)
        )

    async def ListRollouts(
        self, request: pb.ListRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRolloutsResponse:
        """Lists rollouts, newest first or in an order."""
        project = run_project(request.project, request.training_run)
        asked = self._lists.checked(request, project=project)
        return await self._lists.list(asked, await self._scope(project, request.training_run))

    async def CountRollouts(
        self, request: selection_pb.CountRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> selection_pb.CountRolloutsResponse:
        """Counts rollouts by state, failure kind and the values of fields."""
        project = run_project(request.project, request.training_run)
        asked = self._lists.checked_count(request)
        return await self._lists.count(asked, await self._scope(project, request.training_run))

    async def CompareRollouts(
        self, request: comparison_pb.CompareRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> comparison_pb.CompareRolloutsResponse:
        """Compares the rewards of two sets of rollouts of the same tasks."""
        return await self._comparison.compare(request)

    async def UpdateRollout(
        self, request: selection_pb.UpdateRolloutRequest, context: grpc.aio.ServicerContext
    ) -> selection_pb.UpdateRolloutResponse:
        """Changes the priority or the deadline of a live rollout."""
        problems: list[Violation] = []
        with noted(problems):
            name = parse_rollout_name(request.rollout.name, field="rollout.name")
        with noted(problems):
            change = rollout_change(request.rollout, request.update_mask.paths)
            problems += self._changes.problems(change)
        if problems:
            raise malformed_request(problems)
        (view,) = await self._views([name])
        await self._changes.update(view, change)
        (view,) = await self._views([name], in_full=True)
        return selection_pb.UpdateRolloutResponse(rollout=finished_rollout(view))

    async def CancelRollouts(
        self, request: pb.CancelRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelRolloutsResponse:
        """Cancels rollouts by name or by training run."""
        if request.training_run:
            project = run_project(request.project, request.training_run)
            project_id, fence = await self._table.project_id(project), run_fence(request)
            outcome = await self._rollouts.cancel_run(project_id, request.training_run, fence=fence)
        else:
            require_count(request.names, field="names", maximum=MAX_NAMES)
            views = await self._views([parse_rollout_name(name, field="names") for name in request.names])
            outcome = await self._rollouts.cancel([view.rollout_id for view in views])
        return pb.CancelRolloutsResponse(cancelled_count=outcome.cancelled, cancelling_count=outcome.cancelling)

    async def RetryRollouts(
        self, request: pb.RetryRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> pb.RetryRolloutsResponse:
        """Runs final rollouts again as new ones: by name, or dead letters by filter."""
        if not request.filter:
            require_count(request.names, field="names", maximum=MAX_NAMES)
            views = await self._views([parse_rollout_name(name, field="names") for name in request.names])
            new_ids = await self._dead_letters.retry(views, request_id=request.request_id)
            return pb.RetryRolloutsResponse(rollouts=await self._present(new_ids))
        if request.names:
            raise malformed("names", "must be empty with `filter`")
        where = _selected(request.filter)
        project_id, run_id = await self._scope(run_project(request.project, request.training_run), request.training_run)
        rerun = await self._dead_letters.retry_dead(project_id, run_id, where=where, request_id=request.request_id)
        return pb.RetryRolloutsResponse(rollouts=await self._present(rerun.rollout_ids), has_more=rerun.more)

    async def DeleteRollouts(
        self, request: selection_pb.DeleteRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> selection_pb.DeleteRolloutsResponse:
        """Deletes ended rollouts by name or by filter."""
        if not request.filter:
            require_count(request.names, field="names", maximum=MAX_NAMES)
            views = await self._views([parse_rollout_name(name, field="names") for name in request.names])
            return selection_pb.DeleteRolloutsResponse(deleted_count=await self._deletion.delete(views))
        if request.names:
            raise malformed("names", "must be empty with `filter`")
        where = _selected(request.filter)
        project = run_project(request.project, request.training_run)
        listed = f"deleted/{project}/{request.training_run}/{request.filter}"
        last = decode_token(request.page_token, listed=listed, key_bytes=ID_BYTES)
        project_id, run_id = await self._scope(project, request.training_run)
        before = None if last is None else UUID(bytes=last)
        page = await self._deletion.delete_selected(project_id, run_id, where=where, before=before)
        key = page.next_before
        return selection_pb.DeleteRolloutsResponse(
            deleted_count=page.deleted,
            kept_count=page.kept,
            next_page_token="" if key is None else encode_token(key.bytes, listed=listed),
        )

    async def WatchRollouts(
        self, request: pb.WatchRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchRolloutsResponse]:
        """Streams finished groups after the cursor."""
        project_id, run_id = await self._scope(run_project(request.project, request.training_run), request.training_run)
        group_key = None
        if request.group_id:
            group_key = group_key_of(project_id, request.training_run, request.group_id)
        selection = Selection(project_id=project_id, run_id=run_id, group_key=group_key)
        cursor = Cursor.decode(request.cursor, selection)
        if run_id == NO_RUN:
            find = partial(self._table.find_run, project_id, request.training_run)
            async for found in self._feed.await_run(project_id, find, stopping=self._stopping.is_set):
                selection = replace(selection, run_id=found)
                if found == NO_RUN:
                    # A keep-alive without a cursor.
                    yield pb.WatchRolloutsResponse()
        async for page in self._feed.follow(selection, cursor, stopping=self._stopping.is_set):
            if request.training_run and not page.groups:
                # A run that is watched is in use.
                await self._table.find_run(project_id, request.training_run)
            async for message in feed_messages(page, selection, self._table):
                yield message
        raise Draining("The store is shutting down: open the stream again from the last cursor.")

    async def WatchRolloutChanges(
        self, request: rollout_changes_pb2.WatchRolloutChangesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_changes_pb2.WatchRolloutChangesResponse]:
        """Streams rollouts that change after the cursor."""
        run = request.training_run
        project_id, _ = await self._scope(run_project(request.project, run), run)
        selection = ChangeSelection(project_id=project_id, training_run=run)
        pages = self._watch.follow(
            project_id,
            Cursor.decode(request.cursor, selection) if request.cursor else None,
            find_run=partial(self._table.find_run, project_id, run) if run else None,
        )
        async with aclosing(pages):
            async for page in pages:
                async for message in change_messages(page, selection, self._table):
                    yield message
        raise Draining("The store is shutting down: open the stream again from the last cursor.")

    async def GetQueueStats(
        self, request: pb.GetQueueStatsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetQueueStatsResponse:
        """Returns queue statistics and rules."""
        project_id, run_id = await self._scope(run_project(request.project, request.training_run), request.training_run)
        return stats_message(
            await self._stats.stats(project_id, run_id),
            open_credit=self._dispatcher.open_credit(project_id),
            unmatched=self._dispatcher.unmatched_labels(project_id),
        )

    async def PauseQueue(
        self, request: pb.PauseQueueRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseQueueResponse:
        """Pauses the queue of a project."""
        project_id = await self._table.project_id(require_project(request.project))
        response = pb.PauseQueueResponse()
        response.pause_time.FromDatetime(await self._changes.pause(project_id, request.reason))
        return response

    async def ResumeQueue(
        self, request: pb.ResumeQueueRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeQueueResponse:
        """Resumes the queue of a project."""
        project_id = await self._table.project_id(require_project(request.project))
        return pb.ResumeQueueResponse(was_paused=await self._changes.resume(project_id))

    async def _create(
        self, messages: Sequence[rollout_pb2.Rollout], request_id: str, *, fence: RunFence | None = None
    ) -> list[rollout_pb2.Rollout]:
        for message in messages:
            message.project = require_project(message.project or _project_in(message))
        drafts = [new_rollout(message) for message in messages]
        ids = await self._rollouts.create(drafts, request_id=request_id, fence=fence)
        if request_id or any(draft.name for draft in drafts):
            return await self._present(ids)
        return [_queued(draft.project, rollout_id) for draft, rollout_id in zip(drafts, ids, strict=True)]

    async def _scope(self, project: str, training_run: str) -> tuple[int, int | None]:
        """Returns the numbers of project and training run: `NO_RUN` if it is unknown, None if none is named.

        Does not record the training run.
        """
        project_id = await self._table.project_id(project)
        return project_id, await self._table.find_run(project_id, training_run) if training_run else None

    async def _views(self, names: Sequence[RolloutName], *, in_full: bool = False) -> list[RolloutView]:
        """Returns rollouts, in full with usage and ended attempts; fails if one does not exist or the caller may not access it."""
        ids = [name.rollout_id for name in names]
        views = await self._table.view(ids, with_usage=in_full, with_attempts=in_full)
        found = {view.rollout_id: view for view in views}
        may_access = current_caller().may_access
        projects = await self._table.projects.find_all(name.project for name in names)
        for name in names:
            view = found.get(name.rollout_id)
            is_named = view is not None and view.project_id == projects[name.project]
            if not is_named or not may_access(name.project) or not is_own_attempt(name.project, name.rollout_id):
                raise RolloutNotFound("The rollout does not exist.", rollout=str(name))
        return [found[name.rollout_id] for name in names]

    async def _present(self, ids: Sequence[UUID]) -> list[rollout_pb2.Rollout]:
        return [created_rollout(view) for view in await self._table.view(ids)]


def _selected(text: str) -> Expression | None:
    """Returns the filter of a request that requires one; None for `*`, which selects all."""
    return None if text.strip() == ALL else parse_filter(text)


def _project_in(message: rollout_pb2.Rollout) -> str:
    """Returns the project in the names of a rollout to create; empty if it has none, or a malformed one."""
    try:
        if message.name:
            return parse_rollout_name(message.name).project
        return parse_training_run_name(message.training_run).project if message.training_run else ""
    except ArgumentInvalid:
        return ""


def _queued(project: str, rollout_id: UUID) -> rollout_pb2.Rollout:
    return rollout_pb2.Rollout(name=rollout_name(project, rollout_id), state=rollout_pb2.ROLLOUT_STATE_QUEUED)
