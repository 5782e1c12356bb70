"""`PeerService` over gRPC: notifications from other replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc.aio

from fulmen.ids import parse_attempt_name, parse_runner_name
from fulmen.store.v1 import peer_service_pb2 as pb
from fulmen.store.v1 import peer_service_pb2_grpc
from fulmen_store.malformed import malformed
from fulmen_store.replicas.notifications import MAX_CANCELS, MAX_ORDERED, CancelHint, Notification
from fulmen_store.replicas.notifier import NotificationReceiver

__all__ = ["PeerService"]

MAX_PROJECTS = 10_000


class PeerService(peer_service_pb2_grpc.PeerServiceServicer):
    """Receives notifications from other replicas."""

    def __init__(self, receiver: NotificationReceiver) -> None:
        self._receiver = receiver

    async def Notify(self, request: pb.NotifyRequest, context: grpc.aio.ServicerContext) -> pb.NotifyResponse:
        """Handles a notification."""
        for field in ("ready_projects", "finished_projects", "resource_projects"):
            _check_length(field, getattr(request, field), MAX_PROJECTS)
        _check_length("cancels", request.cancels, MAX_CANCELS)
        _check_length("ordered_runners", request.ordered_runners, MAX_ORDERED)
        await self._receiver.receive(
            Notification(
                ready=set(request.ready_projects),
                finished=set(request.finished_projects),
                resources=set(request.resource_projects),
                projects_changed=request.projects_changed,
                ordered={parse_runner_name(name, field="ordered_runners") for name in request.ordered_runners},
                cancels=list(_cancels(request)),
            )
        )
        return pb.NotifyResponse()


def _cancels(request: pb.NotifyRequest) -> Iterator[CancelHint]:
    for index, hint in enumerate(request.cancels):
        attempt = parse_attempt_name(hint.attempt, field=f"cancels[{index}].attempt")
        session_id = parse_runner_name(hint.runner, field=f"cancels[{index}].runner")
        yield CancelHint(session_id=session_id, attempt=attempt)


def _check_length(field: str, entries: Sequence[object], maximum: int) -> None:
    if len(entries) > maximum:
        raise malformed(field, f"has {len(entries)} entries, at most {maximum} are allowed")
