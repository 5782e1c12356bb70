"""`ProjectService` over gRPC: projects and their tokens."""

from __future__ import annotations

import base64
import datetime
from typing import Final, cast

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.errors import PermissionDenied
from fulmen.ids import ALL_PROJECTS
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1 import project_service_pb2_grpc
from fulmen.store.v1.model_limits_pb2 import ModelLimits
from fulmen.store.v1.rollout_service_pb2 import QueueRules
from fulmen_service_kit.security.auth import current_caller, require_project
from fulmen_service_kit.security.introspection import introspected
from fulmen_service_kit.security.keys import StoreKeys, key_id
from fulmen_service_kit.security.tokens import Role, TokenVerifier
from fulmen_store.database.stored import read_column
from fulmen_store.projects.projects import Projects, unknown_project
from fulmen_store.projects.table import (
    IssuedToken,
    ProjectDraft,
    ProjectTable,
    ProjectView,
    TokenDraft,
    TokenPosition,
    TokenTable,
)
from fulmen_store.projects.tokens import Tokens
from fulmen_store.transport.access import project_limit
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.usage_service import fill_spent
from fulmen_store.usage.table import UsageTable

__all__ = [
    "ProjectService",
]

DEFAULT_PAGE: Final = 50
DEFAULT_WEIGHT: Final = 100
# Longer than any name, so that page keys have a fixed length.
NAME_BYTES: Final = 72
PLACE_BYTES: Final = 24
NEWEST: Final = TokenPosition(created_at=datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC), token_id="")
EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class ProjectService(project_service_pb2_grpc.ProjectServiceServicer):
    """Serves projects and tokens."""

    def __init__(
        self,
        *,
        projects: Projects,
        tokens: Tokens,
        table: ProjectTable,
        token_table: TokenTable,
        verifier: TokenVerifier,
        keys: StoreKeys,
        usage: UsageTable,
    ) -> None:
        self._usage = usage
        self._verifier = verifier
        self._keys = keys
        self._projects = projects
        self._tokens = tokens
        self._table = table
        self._token_table = token_table

    async def CreateProject(
        self, request: pb.CreateProjectRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateProjectResponse:
        """Creates a project."""
        view = await self._projects.create(_draft(request.project), request_id=request.request_id)
        return pb.CreateProjectResponse(project=_message(view))

    async def GetProject(
        self, request: pb.GetProjectRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetProjectResponse:
        """Returns one project."""
        name = _visible(request.name or current_caller().own_project)
        return pb.GetProjectResponse(project=await self._with_spent(await self._projects.get(name)))

    async def UpdateProject(
        self, request: pb.UpdateProjectRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateProjectResponse:
        """Replaces every field of a project."""
        _visible(request.project.name)
        view = await self._projects.update(_draft(request.project), etag=request.project.etag)
        return pb.UpdateProjectResponse(project=await self._with_spent(view))

    async def _with_spent(self, view: ProjectView) -> pb.Project:
        """Returns a project with what is spent of its budgets."""
        project = _message(view)
        if project.model_limits.budgets:
            fill_spent(project.model_limits, project.name, await self._usage.spends(project=project.name))
        return project

    async def DeleteProject(
        self, request: pb.DeleteProjectRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteProjectResponse:
        """Deletes a project."""
        await self._projects.delete(_visible(request.name), cancel=request.cancel_running)
        return pb.DeleteProjectResponse()

    async def ResumeAgent(
        self, request: pb.ResumeAgentRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeAgentResponse:
        """Resumes a paused agent version."""
        name = _visible(request.project or current_caller().own_project)
        return pb.ResumeAgentResponse(was_paused=await self._projects.resume_agent(name, request.agent))

    async def ListProjects(
        self, request: pb.ListProjectsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListProjectsResponse:
        """Lists projects by name."""
        only = project_limit()
        listed = f"projects/{only}"
        last = decode_token(request.page_token, listed=listed, key_bytes=NAME_BYTES)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        after = "" if last is None else last.rstrip(b"\0").decode("ascii", "replace")
        found = await self._table.page(after=after, only=only, limit=limit + 1)
        token = ""
        if len(found) > limit:
            token = encode_token(found[limit - 1].name.encode().ljust(NAME_BYTES, b"\0"), listed=listed)
        return pb.ListProjectsResponse(projects=[_message(view) for view in found[:limit]], next_page_token=token)

    async def IssueToken(
        self, request: pb.IssueTokenRequest, context: grpc.aio.ServicerContext
    ) -> pb.IssueTokenResponse:
        """Issues a token."""
        draft = TokenDraft(
            project=request.project,
            role=request.role,
            subject=request.subject,
            ttl_s=_seconds(request.ttl) if request.HasField("ttl") else None,
            training_run=request.training_run,
        )
        if project_limit() is not None:
            _visible(draft.project)
        caller = current_caller()
        if caller.role is Role.SERVICE and draft.role != pb.TOKEN_ROLE_ENGINE:
            raise PermissionDenied("A service token can issue tokens only for engines of runs.", role=caller.role)
        self._tokens.check(draft)
        if draft.project != ALL_PROJECTS:
            await self._projects.get(draft.project)
        token, issued = await self._tokens.issue(draft)
        return pb.IssueTokenResponse(token=token, token_id=issued.token_id, info=_info(issued))

    async def RevokeToken(
        self, request: pb.RevokeTokenRequest, context: grpc.aio.ServicerContext
    ) -> pb.RevokeTokenResponse:
        """Revokes a token."""
        await self._tokens.revoke(request.token_id, project=project_limit())
        return pb.RevokeTokenResponse()

    async def ListTokens(
        self, request: pb.ListTokensRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListTokensResponse:
        """Lists issued tokens, newest first."""
        project = require_project(request.project) if request.project else project_limit()
        listed = f"tokens/{project}"
        last = decode_token(request.page_token, listed=listed, key_bytes=PLACE_BYTES)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        before = NEWEST if last is None else _token_position(last)
        found = await self._token_table.page(project=project, before=before, limit=limit + 1)
        token = encode_token(_place_key(found[limit - 1]), listed=listed) if len(found) > limit else ""
        return pb.ListTokensResponse(tokens=[_info(issued) for issued in found[:limit]], next_page_token=token)

    async def ListRevokedTokens(
        self, request: pb.ListRevokedTokensRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRevokedTokensResponse:
        """Returns the ids of revoked tokens; for a token of one project, only those that are valid there."""
        return pb.ListRevokedTokensResponse(token_ids=await self._token_table.revoked(project=project_limit()))

    async def IntrospectToken(
        self, request: pb.IntrospectTokenRequest, context: grpc.aio.ServicerContext
    ) -> pb.IntrospectTokenResponse:
        """Returns the owner of a token."""
        return introspected(self._verifier, request.token, asked_by=current_caller())

    async def ListSigningKeys(
        self, request: pb.ListSigningKeysRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSigningKeysResponse:
        """Returns the public keys and the time; open to everyone."""
        response = pb.ListSigningKeysResponse(
            keys=[pb.SigningKey(key_id=key_id(key), public_key=key) for key in self._keys.published()]
        )
        response.server_time.FromNanoseconds(round(self._tokens.now_s() * 1e9))
        return response

    async def RefreshToken(
        self, request: pb.RefreshTokenRequest, context: grpc.aio.ServicerContext
    ) -> pb.RefreshTokenResponse:
        """Returns a fresh token for the caller."""
        caller = current_caller()
        project = require_project(request.project) if request.project else caller.project
        if project != caller.project:
            await self._projects.get(project)
        token, expires_at = await self._tokens.refresh(caller, project=project)
        return pb.RefreshTokenResponse(token=token, expire_time=_timestamp(expires_at))


def _visible(name: str) -> str:
    """Returns a project's name if the caller may access it.

    Raises:
        ProjectNotFound: If it may not, as if the project did not exist.
    """
    if not current_caller().may_access(name):
        raise unknown_project(name)
    return name


def _draft(message: pb.Project) -> ProjectDraft:
    rules, limits = message.rules, message.model_limits
    for budget in limits.budgets:
        budget.ClearField("spent_micros")
    return ProjectDraft(
        name=message.name,
        weight=message.weight or DEFAULT_WEIGHT,
        max_running=message.max_running or None,
        max_queued=message.max_queued or None,
        retention_s=_seconds(message.retention) if message.HasField("retention") else None,
        rules=rules.SerializeToString(deterministic=True) if message.HasField("rules") else None,
        ageing_interval_s=_seconds(rules.ageing_interval),
        model_limits=limits.SerializeToString(deterministic=True) if message.HasField("model_limits") else None,
        limits=_numbers(limits),
        budgets=[(each.subject, each.period, each.limit_micros) for each in limits.budgets],
    )


def _numbers(limits: ModelLimits) -> dict[str, int]:
    found = {"attempt_token_budget": limits.attempt_token_budget}
    for whose, each in (("project", limits.project), ("attempt", limits.attempt)):
        found |= {f"{whose}.{field.name}": getattr(each, field.name) for field in each.DESCRIPTOR.fields}
    return found


def _message(view: ProjectView) -> pb.Project:
    message = pb.Project(
        name=view.name,
        weight=view.weight,
        max_running=view.max_running or 0,
        max_queued=view.max_queued or 0,
        etag=view.etag,
        rules=read_column(QueueRules, view.rules),
        model_limits=read_column(ModelLimits, view.model_limits),
        create_time=_timestamp(view.created_at),
    )
    if view.retention is not None:
        message.retention.FromTimedelta(view.retention)
    return message


def _info(issued: IssuedToken) -> pb.TokenInfo:
    info = pb.TokenInfo(
        token_id=issued.token_id,
        project=issued.project,
        role=cast("pb.TokenRole", issued.role),
        subject=issued.subject,
        create_time=_timestamp(issued.created_at),
        expire_time=_timestamp(issued.expires_at),
    )
    if issued.revoked_at is not None:
        info.revoke_time.FromDatetime(issued.revoked_at)
    return info


def _seconds(field: Duration) -> float:
    return field.seconds + field.nanos / 1e9


def _timestamp(moment: datetime.datetime) -> Timestamp:
    field = Timestamp()
    field.FromDatetime(moment)
    return field


def _place_key(issued: IssuedToken) -> bytes:
    micros = (issued.created_at - EPOCH) // datetime.timedelta(microseconds=1)
    return micros.to_bytes(8) + base64.urlsafe_b64decode(issued.token_id + "==")


def _token_position(key: bytes) -> TokenPosition:
    micros = min(int.from_bytes(key[:8]), (NEWEST.created_at - EPOCH) // datetime.timedelta(microseconds=1))
    return TokenPosition(
        created_at=EPOCH + datetime.timedelta(microseconds=micros),
        token_id=base64.urlsafe_b64encode(key[8:]).decode().rstrip("="),
    )
