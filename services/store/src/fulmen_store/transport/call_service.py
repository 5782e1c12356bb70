"""`CallService` over gRPC: recorded calls of apps."""

from __future__ import annotations

import datetime
import math
from typing import Final
from uuid import UUID

import grpc.aio

from fulmen.errors import CallNotFound, PageTokenInvalid, Violation
from fulmen.ids import parse_call_name, parse_conversation_name
from fulmen.store.v1 import call_service_pb2 as pb
from fulmen.store.v1 import call_service_pb2_grpc
from fulmen_service_kit.security.auth import current_caller, require_project
from fulmen_store.calls.calls import CALLS, CONVERSATIONS
from fulmen_store.calls.table import FIRST_PLACE, CallTable, ConversationPlace
from fulmen_store.malformed import malformed, malformed_request, noted
from fulmen_store.projects.names import NO_PROJECT, ProjectNames
from fulmen_store.rollouts.filter import Expression, Schema
from fulmen_store.rollouts.filter_parser import parse_filter
from fulmen_store.transport.access import require_count
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.wire.calls import call_message, conversation_message, read_calls

__all__ = ["CallService"]

MAX_CALLS: Final = 256
MAX_NAMES: Final = 1000
MAX_LABEL: Final = 128
DEFAULT_PAGE: Final = 50
ID_BYTES: Final = 16
HIGHEST_ID: Final = UUID(int=2**128 - 1)


class CallService(call_service_pb2_grpc.CallServiceServicer):
    """Serves recorded calls."""

    def __init__(self, *, table: CallTable, projects: ProjectNames) -> None:
        self._table = table
        self._projects = projects

    async def RecordCalls(
        self, request: pb.RecordCallsRequest, context: grpc.aio.ServicerContext
    ) -> pb.RecordCallsResponse:
        """Stores calls, in a commit for each project."""
        require_count(request.calls, field="calls", maximum=MAX_CALLS)
        rejected = 0
        for project, calls in read_calls(request.calls).items():
            project_id = await self._find(project)
            if project_id == NO_PROJECT:
                rejected += len(calls)
            else:
                await self._table.add(project_id, calls)
        return pb.RecordCallsResponse(rejected_count=rejected)

    async def ListCalls(self, request: pb.ListCallsRequest, context: grpc.aio.ServicerContext) -> pb.ListCallsResponse:
        """Lists calls, newest first."""
        project = require_project(request.project)
        where, limit = _selection(request.filter, CALLS, request.page_size)
        listed = f"calls/{project}/{request.filter}"
        last = decode_token(request.page_token, listed=listed, key_bytes=ID_BYTES)
        views = await self._table.page(
            await self._projects.require(project),
            where=where,
            before=HIGHEST_ID if last is None else UUID(bytes=last),
            limit=limit + 1,
            with_content=request.with_content,
        )
        # Cut by size, or by count: the next page begins below the last of this one. It may turn out to be empty.
        more = len(views) > limit or (request.with_content and bool(views))
        views = views[:limit]
        return pb.ListCallsResponse(
            calls=[call_message(view, project) for view in views],
            next_page_token=encode_token(views[-1].id.bytes, listed=listed) if more else "",
        )

    async def GetCall(self, request: pb.GetCallRequest, context: grpc.aio.ServicerContext) -> pb.GetCallResponse:
        """Returns a call with its texts."""
        project, call_id = parse_call_name(request.name)
        view = await self._table.get(await self._find(project), call_id)
        if view is None:
            raise _not_found(request.name)
        return pb.GetCallResponse(call=call_message(view, project))

    async def ListConversations(
        self, request: pb.ListConversationsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListConversationsResponse:
        """Lists conversations, newest first."""
        project = require_project(request.project)
        where, limit = _selection(request.filter, CONVERSATIONS, request.page_size)
        listed = f"conversations/{project}/{request.filter}"
        last = decode_token(request.page_token, listed=listed)
        views = await self._table.conversations(
            await self._projects.require(project),
            where=where,
            before=FIRST_PLACE if last is None else _place(last),
            limit=limit + 1,
        )
        token = ""
        if len(views) > limit:
            end = views[limit - 1]
            token = encode_token(f"{end.created_at.isoformat()}/{end.conversation}".encode(), listed=listed)
        return pb.ListConversationsResponse(
            conversations=[conversation_message(view, project) for view in views[:limit]], next_page_token=token
        )

    async def DeleteConversations(
        self, request: pb.DeleteConversationsRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteConversationsResponse:
        """Deletes conversations with their calls."""
        require_count(request.names, field="names", maximum=MAX_NAMES)
        parsed = [parse_conversation_name(name, field="names") for name in request.names]
        projects = {project for project, _ in parsed}
        if len(projects) > 1:
            raise malformed("names", "are of several projects")
        project_id = await self._projects.require(require_project(projects.pop()))
        count = await self._table.remove(project_id, [conversation for _, conversation in parsed])
        return pb.DeleteConversationsResponse(deleted_call_count=count)

    async def RateConversation(
        self, request: pb.RateConversationRequest, context: grpc.aio.ServicerContext
    ) -> pb.RateConversationResponse:
        """Sets score and label of a conversation."""
        problems: list[Violation] = []
        project = conversation = ""
        with noted(problems):
            project, conversation = parse_conversation_name(request.name)
        if not math.isfinite(request.score):
            problems.append(Violation(field="score", description="is not a finite number"))
        if len(request.label) > MAX_LABEL or "\0" in request.label:
            problems.append(
                Violation(field="label", description=f"has a NUL character or more than {MAX_LABEL} characters")
            )
        if problems:
            raise malformed_request(problems)
        score = request.score if request.HasField("score") else None
        view = await self._table.rate(await self._find(project), conversation, score=score, label=request.label)
        if view is None:
            raise _not_found(request.name)
        return pb.RateConversationResponse(conversation=conversation_message(view, project))

    async def _find(self, project: str) -> int:
        """Returns the number of a project; `NO_PROJECT` if it is unknown or the caller has no access to it."""
        return await self._projects.find(project) if current_caller().may_access(project) else NO_PROJECT


def _selection(text: str, schema: Schema, requested: int) -> tuple[Expression | None, int]:
    """Returns the filter of a list and the size of its pages.

    Raises:
        ArgumentInvalid: With every problem.
    """
    problems: list[Violation] = []
    where, limit = None, 0
    with noted(problems):
        where = parse_filter(text, schema)
    with noted(problems):
        limit = page_size(requested, default=DEFAULT_PAGE)
    if problems:
        raise malformed_request(problems)
    return where, limit


def _place(packed: bytes) -> ConversationPlace:
    try:
        moment, _, conversation = packed.decode().partition("/")
        created_at = datetime.datetime.fromisoformat(moment)
    except ValueError:
        raise PageTokenInvalid("The page token is malformed.") from None
    if created_at.tzinfo is None:
        raise PageTokenInvalid("The page token is malformed.")
    return created_at, conversation


def _not_found(name: str) -> CallNotFound:
    return CallNotFound("It is not recorded, or was deleted.", name=name)
