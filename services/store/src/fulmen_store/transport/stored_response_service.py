"""`StoredResponseService` over gRPC: responses that the LLM proxy keeps."""

from __future__ import annotations

import datetime
from typing import Final
from uuid import UUID

import grpc.aio

from fulmen.errors import Violation
from fulmen.ids import parse_attempt_name
from fulmen.store.v1 import stored_response_service_pb2 as pb
from fulmen.store.v1 import stored_response_service_pb2_grpc
from fulmen_service_kit.security.auth import require_project
from fulmen_store.calls.responses import NewResponse, StoredResponseTable, StoredResponseView
from fulmen_store.malformed import malformed_request, noted
from fulmen_store.projects.names import ProjectNames

__all__ = ["StoredResponseService"]

MAX_CONTENT_BYTES: Final = 3 * 1024 * 1024
MAX_COUNT: Final = 1000
ROW_BYTES: Final = 1024
"""What a response takes besides its content: its row, and its places in indexes."""


class StoredResponseService(stored_response_service_pb2_grpc.StoredResponseServiceServicer):
    """Serves stored responses."""

    def __init__(self, *, table: StoredResponseTable, projects: ProjectNames) -> None:
        self._table = table
        self._projects = projects

    async def PutStoredResponse(
        self, request: pb.PutStoredResponseRequest, context: grpc.aio.ServicerContext
    ) -> pb.PutStoredResponseResponse:
        """Stores a response."""
        problems: list[Violation] = []
        project, given = require_project(request.project), request.response
        _check_attempt(request.attempt, project, problems)
        response_id = _id(given.id, "response.id", problems)
        previous_id = _id(given.previous_id, "response.previous_id", problems) if given.previous_id else None
        content_bytes = len(given.input_json) + len(given.response_json)
        if content_bytes > MAX_CONTENT_BYTES:
            problems.append(_violation("response", f"has {content_bytes} bytes, allowed are {MAX_CONTENT_BYTES}"))
        if problems:
            raise malformed_request(problems)
        ends = request.HasField("expire_time")
        await self._table.add(
            NewResponse(
                project_id=await self._projects.require(project),
                id=response_id,
                attempt=request.attempt,
                previous_id=previous_id,
                input=given.input_json,
                response=given.response_json,
                size_bytes=content_bytes + ROW_BYTES,
                expires_at=request.expire_time.ToDatetime(tzinfo=datetime.UTC) if ends else None,
            )
        )
        return pb.PutStoredResponseResponse()

    async def GetStoredResponses(
        self, request: pb.GetStoredResponsesRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStoredResponsesResponse:
        """Returns a response and those before it."""
        problems: list[Violation] = []
        project = require_project(request.project)
        _check_attempt(request.attempt, project, problems)
        response_id = _id(request.id, "id", problems)
        if not 0 <= request.max_count <= MAX_COUNT:
            problems.append(_violation("max_count", f"is {request.max_count}, allowed are 1 to {MAX_COUNT}"))
        if problems:
            raise malformed_request(problems)
        views = await self._table.chain(
            await self._projects.require(project), response_id, request.attempt, request.max_count or 1
        )
        return pb.GetStoredResponsesResponse(responses=[_message(view) for view in views])

    async def DeleteStoredResponse(
        self, request: pb.DeleteStoredResponseRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteStoredResponseResponse:
        """Deletes a response."""
        problems: list[Violation] = []
        project = require_project(request.project)
        _check_attempt(request.attempt, project, problems)
        response_id = _id(request.id, "id", problems)
        if problems:
            raise malformed_request(problems)
        deleted = await self._table.remove(await self._projects.require(project), response_id, request.attempt)
        return pb.DeleteStoredResponseResponse(deleted=deleted)


def _check_attempt(attempt: str, project: str, problems: list[Violation]) -> None:
    if attempt:
        with noted(problems):
            if parse_attempt_name(attempt, field="attempt").project != project:
                problems.append(_violation("attempt", "is of another project"))


def _id(text: str, field: str, problems: list[Violation]) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        problems.append(_violation(field, "is not a UUID"))
        return UUID(int=0)


def _violation(field: str, description: str) -> Violation:
    return Violation(field=field, description=description)


def _message(view: StoredResponseView) -> pb.StoredResponse:
    return pb.StoredResponse(
        id=view.id.hex,
        previous_id="" if view.previous_id is None else view.previous_id.hex,
        input_json=view.input,
        response_json=view.response,
        depth=view.depth,
        chain_bytes=view.chain_bytes,
    )
