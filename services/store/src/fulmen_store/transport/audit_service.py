"""`AuditService` over gRPC: the audit log, for admins."""

from __future__ import annotations

import datetime
from typing import Final
from uuid import UUID

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.store.v1 import audit_service_pb2 as pb
from fulmen.store.v1 import audit_service_pb2_grpc
from fulmen_service_kit.rpc.message_sizes import fitting
from fulmen_service_kit.security.auth import require_project
from fulmen_store.audit.entries import Entry
from fulmen_store.audit.table import AuditTable
from fulmen_store.malformed import malformed
from fulmen_store.projects.names import ProjectNames
from fulmen_store.transport.access import project_limit
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size

__all__ = ["AuditService"]

DEFAULT_PAGE: Final = 100
PAGE_BYTES: Final = 1024 * 1024
ID_BYTES: Final = 16
LAST: Final = 2**128 - 1
UUID_TIME_SHIFT: Final = 80
MAX_TEXT: Final = 128


class AuditService(audit_service_pb2_grpc.AuditServiceServicer):
    """Serves the audit log."""

    def __init__(self, *, table: AuditTable, projects: ProjectNames) -> None:
        self._table = table
        self._projects = projects

    async def ListAuditEntries(
        self, request: pb.ListAuditEntriesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAuditEntriesResponse:
        """Lists entries, newest first."""
        project = require_project(request.project) if request.project else project_limit()
        for field in ("actor", "action"):
            if len(text := getattr(request, field)) > MAX_TEXT or "\0" in text:
                raise malformed(field, f"has a NUL character or more than {MAX_TEXT} characters")
        first = _bound(request.start_time, "start_time") if request.HasField("start_time") else 0
        before = _bound(request.end_time, "end_time") if request.HasField("end_time") else LAST
        listed = f"audit/{project}/{first}/{before}/{request.errors_only}/{request.action}/{request.actor}"
        last = decode_token(request.page_token, listed=listed, key_bytes=ID_BYTES)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        if project is not None:
            await self._projects.require(project)
        found = await self._table.page(
            project=project,
            first=UUID(int=first),
            before=UUID(int=before) if last is None else UUID(bytes=last),
            actor=request.actor,
            action=request.action,
            errors_only=request.errors_only,
            limit=limit + 1,
        )
        shown = fitting((_message(entry) for entry in found[:limit]), max_bytes=PAGE_BYTES)
        token = encode_token(found[len(shown) - 1].id.bytes, listed=listed) if len(shown) < len(found) else ""
        return pb.ListAuditEntriesResponse(entries=shown, next_page_token=token)


def _bound(field: Timestamp, path: str) -> int:
    """Returns the lowest id of an entry from a time on."""
    try:
        seconds = field.ToDatetime(tzinfo=datetime.UTC).timestamp()
    except (ValueError, OverflowError):
        raise malformed(path, "is not a time between the years 1 and 9999") from None
    return max(0, int(seconds * 1000)) << UUID_TIME_SHIFT


def _message(entry: Entry) -> pb.AuditEntry:
    message = pb.AuditEntry(
        action=entry.action,
        code=entry.code,
        reason=entry.reason,
        actor=entry.actor,
        role=entry.role,
        token_id=entry.token_id,
        project=entry.project,
        request_json=entry.request,
        trace_id=entry.trace_id,
        left_out_count=entry.left_out,
        id=str(entry.id),
    )
    message.time.FromDatetime(entry.ended_at)
    return message
