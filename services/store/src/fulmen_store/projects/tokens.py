"""Issued tokens: returned once, listed and revoked by id. The token itself is never stored.

Tokens signed with the deployment's key outside the store (to set up a deployment) are also valid, but unknown here:
they cannot be listed or revoked, and end only by expiry.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Final, cast

from fulmen.errors import ArgumentInvalid, PermissionDenied, TokenInvalid, TokenNotFound, Violation
from fulmen.ids import ALL_PROJECTS, parse_training_run_name
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen_service_kit.security.held_token import REFRESHED_ROLES
from fulmen_service_kit.security.introspection import ROLE_NUMBERS, ROLES
from fulmen_service_kit.security.revocation import RevokedTokens
from fulmen_service_kit.security.tokens import REVOKED, RUN_ROLES, Caller, TokenSigner, new_token_id
from fulmen_store.projects.projects import is_project_name
from fulmen_store.projects.table import IssuedToken, TokenDraft, TokenTable

__all__ = [
    "Tokens",
    "reach_problem",
]

DEFAULT_TTL_S: Final = 30 * 86_400.0
MIN_TTL_S: Final = 60.0
MAX_TTL_S: Final = 3_652 * 86_400.0
RUN_TTL_S: Final = 600.0
MAX_RUN_TTL_S: Final = 86_400.0
MAX_REFRESHED_S: Final = 30 * 86_400.0
MAX_SUBJECT: Final = 128
TOKEN_ID_CHARS: Final = 22


class Tokens:
    """Issues and revokes tokens."""

    def __init__(
        self,
        *,
        table: TokenTable,
        signer: TokenSigner,
        revoked: RevokedTokens,
    ) -> None:
        """Creates the use cases.

        Args:
            table: Table of issued tokens.
            signer: Signer with the deployment's key.
            revoked: Ids of revoked tokens; revocations take effect here immediately.
        """
        self._table = table
        self._signer = signer
        self._revoked = revoked

    def now_s(self) -> float:
        """Returns the time by which tokens are judged, Unix seconds."""
        return self._signer.clock()

    def check(self, draft: TokenDraft) -> None:
        """Validates a request for a token.

        Raises:
            ArgumentInvalid: If the draft is invalid; lists every problem.
        """
        violations = [Violation(field=path, description=text) for path, text in _problems(draft)]
        if violations:
            raise ArgumentInvalid("The token cannot be issued.", violations=violations)

    async def issue(self, draft: TokenDraft) -> tuple[str, IssuedToken]:
        """Records and creates a token; the draft must be validated and its project must exist."""
        role = ROLES[cast("pb.TokenRole", draft.role)]
        usual_s = RUN_TTL_S if role in RUN_ROLES else DEFAULT_TTL_S
        ttl_s = usual_s if draft.ttl_s is None else draft.ttl_s
        issued = await self._table.add(new_token_id(), draft, ttl_s=ttl_s)
        token = self._signer.issue(
            role,
            subject=draft.subject,
            ttl_s=ttl_s,
            project=draft.project,
            token_id=issued.token_id,
            training_run=draft.training_run,
        )
        return token, issued

    async def refresh(self, caller: Caller, *, project: str) -> tuple[str, datetime.datetime]:
        """Creates a token with the id, role and subject of the caller's, valid for as long; returns it and its expiry.

        A token signed outside the store is recorded with this, so that it can be listed and revoked from then on.

        Args:
            caller: The caller.
            project: Project of the new token; the caller may access it.

        Raises:
            PermissionDenied: If the token belongs to a person, or there is none.
            TokenInvalid: If it was revoked.
        """
        if caller.role not in REFRESHED_ROLES or not _is_token_id(caller.token_id):
            raise PermissionDenied(
                f"Tokens of role {caller.role} are not refreshed: issue another with `fulmen token issue`.",
                role=caller.role,
            )
        ttl_s = min(max(caller.expires_s - caller.issued_s, MIN_TTL_S), MAX_REFRESHED_S)
        draft = TokenDraft(
            project=caller.project,
            role=ROLE_NUMBERS[caller.role],
            subject=caller.subject,
            ttl_s=ttl_s,
            training_run=caller.training_run,
        )
        self.check(draft)
        issued = await self._table.extend(caller.token_id, draft, ttl_s=ttl_s)
        if issued is None:
            raise TokenInvalid("The token was revoked.", problem=REVOKED)
        token = self._signer.issue(
            caller.role,
            subject=caller.subject,
            ttl_s=ttl_s,
            project=project,
            token_id=caller.token_id,
            training_run=caller.training_run,
        )
        return token, datetime.datetime.fromtimestamp(self.now_s() + ttl_s, datetime.UTC)

    async def revoke(self, token_id: str, *, project: str | None) -> None:
        """Revokes a token permanently.

        Raises:
            TokenNotFound: If no token has this id, or it is of another project than `project`.
        """
        if not _is_token_id(token_id) or not await self._table.revoke(token_id, project=project):
            raise TokenNotFound("The token does not exist.", token_id=token_id[:TOKEN_ID_CHARS])
        self._revoked.add(token_id)


def _is_token_id(text: str) -> bool:
    return len(text) == TOKEN_ID_CHARS and text.isascii() and text.isprintable()


def _is_run_of(name: str, project: str) -> bool:
    try:
        return parse_training_run_name(name).project == project
    except ArgumentInvalid:
        return False


def reach_problem(project: str) -> str:
    """Returns a description of the problem with a token's project; empty if it is valid."""
    if project == ALL_PROJECTS or is_project_name(project):
        return ""
    return "is neither of the form projects/{project} nor projects/*"


def _problems(draft: TokenDraft) -> Iterator[tuple[str, str]]:
    if text := reach_problem(draft.project):
        yield "project", text
    if draft.role not in ROLES:
        yield "role", f"{draft.role} is not a known role"
    is_of_run = ROLES.get(cast("pb.TokenRole", draft.role)) in RUN_ROLES
    max_s, longest = (MAX_RUN_TTL_S, "1 day") if is_of_run else (MAX_TTL_S, "10 years")
    if draft.ttl_s is not None and not MIN_TTL_S <= draft.ttl_s <= max_s:
        yield "ttl", f"is {draft.ttl_s:g} s, allowed are 1 min to {longest}"
    if is_of_run and not _is_run_of(draft.training_run, draft.project):
        yield "training_run", "must name a run of the token's project, projects/{project}/trainingRuns/{id}"
    elif draft.training_run and not is_of_run:
        yield "training_run", "is only for tokens of role engine or rank"
    if not 1 <= len(draft.subject) <= MAX_SUBJECT or not draft.subject.isprintable():
        yield "subject", "is not 1 to 128 printable characters"
