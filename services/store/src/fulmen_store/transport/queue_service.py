"""`QueueService` over gRPC: what people see of queues."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from fulmen.errors import Draining
from fulmen.store.v1 import queue_service_pb2 as pb
from fulmen.store.v1 import queue_service_pb2_grpc
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.scheduling.queue_watch import QueueWatch
from fulmen_store.scheduling.table import QueueStatsTable
from fulmen_store.transport.access import project_limit, run_project
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.wire.queues import queue_message, watched_message

__all__ = ["QueueService"]

DEFAULT_PAGE = 50
# The longest name of a project: `projects/` and 63 characters.
NAME_BYTES = 72


class QueueService(queue_service_pb2_grpc.QueueServiceServicer):
    """Serves the queues of projects."""

    def __init__(self, *, table: QueueStatsTable, watch: QueueWatch, rollouts: RolloutTable) -> None:
        self._table = table
        self._watch = watch
        self._rollouts = rollouts

    async def ListQueues(
        self, request: pb.ListQueuesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListQueuesResponse:
        """Lists queues by the names of their projects."""
        only = project_limit()
        listed = f"queues/{only}"
        last = decode_token(request.page_token, listed=listed, key_bytes=NAME_BYTES)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        after = "" if last is None else last.rstrip(b"\0").decode("ascii", "replace")
        found = await self._table.queues(after=after, only=only, limit=limit + 1)
        token = ""
        if len(found) > limit:
            token = encode_token(found[limit - 1].project.encode().ljust(NAME_BYTES, b"\0"), listed=listed)
        return pb.ListQueuesResponse(queues=map(queue_message, found[:limit]), next_page_token=token)

    async def WatchQueueStats(
        self, request: pb.WatchQueueStatsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchQueueStatsResponse]:
        """Streams the statistics of a queue."""
        project = run_project(request.project, request.training_run)
        project_id = await self._rollouts.project_id(project)
        states = self._watch.follow(project_id, request.training_run)
        async with aclosing(states):
            async for seen in states:
                yield watched_message(seen)
        raise Draining("The store is shutting down: open the stream again.")
