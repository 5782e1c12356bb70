"""Projects and issued tokens in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import asyncpg

from fulmen_store.budgets import Budget
from fulmen_store.database.database import Database

__all__ = [
    "DeletedProject",
    "IssuedToken",
    "ProjectDraft",
    "ProjectTable",
    "ProjectView",
    "TokenDraft",
    "TokenPosition",
    "TokenTable",
]

CREATE = "CreateProject"
# Number under which requests for the whole deployment are logged.
DEPLOYMENT = 0
MAX_REVOKED = 100_000


class ProjectTable:
    """Reads and writes projects."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, draft: ProjectDraft, *, request_id: str) -> ProjectView | None:
        """Adds a project, or returns the one that the same request added before; None if the name is taken."""
        repeated = await self._logged(request_id)
        if repeated is not None:
            return await self.find(repeated)
        try:
            async with self._database.transaction() as transaction:
                row = await transaction.fetch_row("add_project", draft.name, *_columns(draft))
                if row is not None and request_id:
                    arguments = (DEPLOYMENT, CREATE, request_id, draft.name.encode())
                    if await transaction.fetch_row("log_request", *arguments) is None:
                        raise _RepeatedRequest
        except _RepeatedRequest:
            row = None
        if row is not None:
            return _project(row)
        # Of two concurrent equal requests, the second has waited for the first on the unique name or id.
        repeated = await self._logged(request_id)
        return None if repeated is None else await self.find(repeated)

    async def find(self, name: str) -> ProjectView | None:
        """Returns a project."""
        row = await self._database.fetch_row("get_project", name)
        return None if row is None else _project(row)

    async def replace(self, draft: ProjectDraft, *, revision: int) -> ProjectView | None:
        """Replaces every field if the project is still at `revision`; otherwise returns None."""
        row = await self._database.fetch_row("replace_project", draft.name, *_columns(draft), revision)
        return None if row is None else _project(row)

    async def delete(self, name: str, *, cancel: bool) -> DeletedProject | None:
        """Deletes a project and revokes its tokens, in one commit, unless one of its rollouts runs and is not to be cancelled.

        Returns None if there is none of this name; one that is deleted already counts.
        """
        async with self._database.transaction() as transaction:
            row = await transaction.fetch_row("hold_project", name)
            if row is None:
                return None
            if row["running"] is not None and not cancel:
                return DeletedProject(running=row["running"])
            await transaction.fetch("mark_deleted", name)
            await transaction.fetch("revoke_project_tokens", name)
        return DeletedProject(running=None)

    async def resume_agent(self, name: str, agent: str) -> bool:
        """Forgets the lost runners of an agent version of a project; returns whether it was paused."""
        row = await self._database.fetch_row("resume_agent", name, agent)
        return row is not None and row["was_paused"]

    async def page(self, *, after: str, only: str | None, limit: int) -> list[ProjectView]:
        """Returns projects ordered by name, after a name; with `only`, at most that project."""
        return [_project(row) for row in await self._database.fetch("list_projects", after, only, limit)]

    async def _logged(self, request_id: str) -> str | None:
        if not request_id:
            return None
        row = await self._database.fetch_row("logged_request", DEPLOYMENT, CREATE, request_id)
        return None if row is None else row["result"].decode()


class TokenTable:
    """Reads and writes issued tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, token_id: str, draft: TokenDraft, *, ttl_s: float) -> IssuedToken:
        """Records a token."""
        row = await self._database.fetch_row("add_token", token_id, draft.project, draft.role, draft.subject, ttl_s)
        assert row is not None
        return _token(row)

    async def extend(self, token_id: str, draft: TokenDraft, *, ttl_s: float) -> IssuedToken | None:
        """Records a token whose validity starts again, known or not; returns None if it was revoked."""
        row = await self._database.fetch_row("extend_token", token_id, draft.project, draft.role, draft.subject, ttl_s)
        return None if row is None else _token(row)

    async def revoke(self, token_id: str, *, project: str | None) -> bool:
        """Revokes a token, optionally only if it is of this project; returns False if it does not exist."""
        return bool(await self._database.fetch("revoke_token", token_id, project))

    async def page(self, *, project: str | None, before: TokenPosition, limit: int) -> list[IssuedToken]:
        """Returns unexpired tokens, newest first, after a position in the list."""
        position = (before.created_at, before.token_id, limit)
        if project is None:
            rows = await self._database.fetch("list_tokens", *position)
        else:
            rows = await self._database.fetch("list_project_tokens", *position, project)
        return [_token(row) for row in rows]

    async def revoked(self, *, project: str | None = None) -> list[str]:
        """Returns the ids of unexpired revoked tokens; with `project`, only those for it or for all projects."""
        return [row["id"] for row in await self._database.fetch("revoked_tokens", project, MAX_REVOKED)]


class _RepeatedRequest(Exception):
    """Raised to roll back the additions of a repeated request."""


def _columns(draft: ProjectDraft) -> tuple[object, ...]:
    retention = None if draft.retention_s is None else datetime.timedelta(seconds=draft.retention_s)
    return (draft.weight, draft.max_running, draft.max_queued, retention, draft.rules, draft.model_limits)


def _project(row: asyncpg.Record) -> ProjectView:
    return ProjectView(**(dict(row) | {"weight": round(row["weight"])}))


def _token(row: asyncpg.Record) -> IssuedToken:
    values = dict(row)
    return IssuedToken(token_id=values.pop("id"), **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectDraft:
    """A project as requested.

    Attributes:
        max_running: Maximum number of running rollouts; None means unlimited.
        max_queued: Maximum number of waiting rollouts; None means unlimited.
        retention_s: Retention of final rollouts and spans, seconds; None means forever.
        rules: Serialized `fulmen.store.v1.QueueRules`, opaque here; None means the defaults.
        ageing_interval_s: Ageing interval of the rules, seconds; 0 is off.
        model_limits: Serialized `fulmen.store.v1.ModelLimits`, opaque here; None means no limits.
        limits: Numbers in `model_limits` by path, such as `project.tokens_per_minute`; 0 means no limit.
        budgets: Budgets in `model_limits`.
    """

    name: str
    weight: int = 100
    max_running: int | None = None
    max_queued: int | None = None
    retention_s: float | None = None
    rules: bytes | None = None
    ageing_interval_s: float = 0.0
    model_limits: bytes | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    budgets: Sequence[Budget] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectView:
    """A stored project; the revision changes with every update."""

    name: str
    weight: int
    max_running: int | None
    max_queued: int | None
    retention: datetime.timedelta | None
    rules: bytes | None
    model_limits: bytes | None
    revision: int
    created_at: datetime.datetime

    @property
    def etag(self) -> str:
        """Etag that an update must present."""
        return str(self.revision)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedProject:
    """A deleted project, or one of its running rollouts, which kept it from being deleted."""

    running: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraft:
    """A token as requested.

    Attributes:
        project: `projects/{project}` or `projects/*`.
        role: Number of a `fulmen.store.v1.TokenRole`.
        subject: User or program that the token identifies.
        ttl_s: Lifetime, seconds; None means the usual one of the role.
        training_run: Role ENGINE or RANK: the run that it is bound to.
    """

    project: str
    role: int
    subject: str
    ttl_s: float | None = None
    training_run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedToken:
    """The record of an issued token."""

    token_id: str
    project: str
    role: int
    subject: str
    created_at: datetime.datetime
    expires_at: datetime.datetime
    revoked_at: datetime.datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPosition:
    """Position of a token in the list."""

    created_at: datetime.datetime
    token_id: str
