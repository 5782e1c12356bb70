"""`RunnerRegistryService` over gRPC: who runs, from the sessions of the lease service."""

from __future__ import annotations

from uuid import UUID

import grpc.aio

from fulmen.errors import RunnerNotFound
from fulmen.store.v1 import lease_pb2, runner_registry_service_pb2_grpc
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen_store.persistence.leases import PgSessions, SessionView
from fulmen_store.transport.access import project_limit
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.rollout_codec import runner_name

__all__ = ["RunnerRegistryService"]

DEFAULT_PAGE = 50
LISTED = "runners"


class RunnerRegistryService(runner_registry_service_pb2_grpc.RunnerRegistryServiceServicer):
    """Serves the live runner sessions."""

    def __init__(self, *, table: PgSessions) -> None:
        """Takes the table of sessions."""
        self._table = table

    async def ListRunners(
        self, request: pb.ListRunnersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRunnersResponse:
        """Lists live sessions, oldest first."""
        last = decode_token(request.page_token, listed=LISTED, key_bytes=16)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        after = UUID(int=0) if last is None else UUID(bytes=last)
        found = await self._table.page(after=after, limit=limit + 1, project=project_limit())
        token = encode_token(found[limit - 1].session_id.bytes, listed=LISTED) if len(found) > limit else ""
        return pb.ListRunnersResponse(runners=[_runner(view) for view in found[:limit]], next_page_token=token)

    async def GetRunner(self, request: pb.GetRunnerRequest, context: grpc.aio.ServicerContext) -> pb.GetRunnerResponse:
        """Returns one live session."""
        try:
            view = await self._table.find(UUID(request.name.removeprefix("runners/")), project=project_limit())
        except ValueError:
            view = None
        if view is None:
            raise RunnerNotFound("There is no such runner session.", runner=request.name[:128])
        return pb.GetRunnerResponse(runner=_runner(view))


def _runner(view: SessionView) -> pb.Runner:
    runner = pb.Runner(
        name=runner_name(view.session_id),
        info=lease_pb2.RunnerInfo.FromString(view.info),
        running_count=view.running,
    )
    runner.create_time.FromDatetime(view.opened_at)
    runner.lease_expire_time.FromDatetime(view.lease_until)
    return runner
