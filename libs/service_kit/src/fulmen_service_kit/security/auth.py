"""Authentication of rpcs, and their authorization by `permissions`."""

from contextvars import ContextVar
from typing import Protocol

import structlog
from opentelemetry import metrics

from fulmen.errors import PermissionDenied, TokenInvalid, TooManyInvalidTokens
from fulmen.ids import ALL_PROJECTS
from fulmen_service_kit.security.permissions import OPEN, SELF_CHECKING, Scope, require, rule
from fulmen_service_kit.security.refusals import Refusals
from fulmen_service_kit.security.token_buckets import TokenBuckets
from fulmen_service_kit.security.tokens import FORGED, MALFORMED, Caller, Role

_MAX_NAME = 128
# Health and reflection expose no data; probes have no token.
_OPEN_PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.")

SEVERAL = "\0several"
"""Stands for the authorization of a request with several such headers; no client can send it."""

_log = structlog.get_logger()

_caller: ContextVar[Caller] = ContextVar("fulmen_caller")


def current_caller() -> Caller:
    """Returns the caller of the current rpc.

    Raises:
        LookupError: Outside an rpc.
    """
    return _caller.get()


def require_project(name: str) -> str:
    """Returns the project of a request; by default the token's own, or the default project for a token for all.

    Does not check that the project exists.

    Raises:
        PermissionDenied: If the caller is bound to another project.
    """
    caller = current_caller()
    project = name or caller.own_project
    if not caller.may_access(project):
        raise PermissionDenied(
            f"The token belongs to another project. Use a token of {project[:_MAX_NAME]}.", role=caller.role
        )
    return project


def current_tenant() -> str:
    """Returns the project of the current rpc's caller; empty outside an rpc, and for tokens for all projects."""
    caller = _caller.get(None)
    return "" if caller is None or caller.project == ALL_PROJECTS else caller.project


def set_caller(caller: Caller) -> None:
    """Sets the caller in this context; for the rpc and HTTP edges."""
    _caller.set(caller)


class Verifier(Protocol):
    """Verifies tokens. Implementations: `TokenVerifier` with the deployment's keys, `StoreVerifier` with an rpc."""

    async def prepare(self, token: str) -> None:
        """Loads what `verify` needs. Raises Unavailable."""

    def verify(self, token: str) -> Caller:
        """Returns the token's caller. Raises TokenInvalid."""
        ...

    def check(self, caller: Caller) -> None:
        """Raises TokenInvalid or Unavailable if the caller's token is no longer valid."""


class Authenticator:
    """Authenticates and authorizes calls."""

    def __init__(
        self,
        *,
        verifier: Verifier,
        dev_mode: bool,
        project: str = ALL_PROJECTS,
        failures: TokenBuckets | None = None,
    ) -> None:
        """Initializes the authenticator.

        Args:
            verifier: Verifies tokens.
            dev_mode: Whether calls without a token have the role admin.
            project: Project that the service serves, `projects/{project}`; by default all.
            failures: Limits forged tokens by address; None for no limit.
        """
        self._refusals = Refusals()
        self._verifier = verifier
        self._project = project
        self._dev_mode = dev_mode
        self._failures = failures
        self._refused = metrics.get_meter("fulmen.auth").create_counter(
            "auth.refused", description="Rejected tokens by problem."
        )

    async def admit(self, rpc: str, authorization: str, address: str) -> Caller | None:
        """Authenticates a call; returns None if the rpc is open to everyone or authenticates calls itself.

        Raises:
            TokenInvalid: If the token is missing or invalid.
            TooManyInvalidTokens: If it is forged and the address has exceeded its limit.
            Unavailable: If the token cannot be verified now.
        """
        if rpc.startswith(_OPEN_PREFIXES) or rpc in OPEN or (not authorization and rpc in SELF_CHECKING):
            return None
        return await self.identify(authorization, address)

    async def identify(self, authorization: str, address: str) -> Caller:
        """Authenticates a call by a token, which a servicer may have read from its request. A refusal comes late.

        Raises:
            TokenInvalid: If the token is missing or invalid.
            TooManyInvalidTokens: If it is forged and the address has exceeded its limit.
            Unavailable: If the token cannot be verified now.
        """
        await self._verifier.prepare(authorization.partition(" ")[2].strip())
        try:
            return self._known(authorization, address)
        except (TokenInvalid, TooManyInvalidTokens) as error:
            if isinstance(error, TooManyInvalidTokens) and not self._refusals.is_holding(address):
                _log.warning("too_many_bad_tokens", address=address)
            await self._refusals.hold(address)
            raise

    def authorize(self, rpc: str, caller: Caller) -> None:
        """Checks that a caller may call an rpc.

        Raises:
            PermissionDenied: If it may not.
        """
        require(caller, rpc, self._project if rule(rpc).scope is Scope.SERVICE else None)

    def _known(self, authorization: str, address: str) -> Caller:
        try:
            return self._verified(authorization)
        except TokenInvalid as error:
            problem = error.metadata.get("problem", "")
            self._refused.add(1, {"problem": problem})
            wait_s = self._failures.take(address) if self._failures is not None and problem == FORGED else 0.0
            if not wait_s:
                raise
            raise TooManyInvalidTokens(
                "Too many tokens from this address were not issued by this deployment.", retry_after_s=wait_s
            ) from None

    def _verified(self, authorization: str) -> Caller:
        if not authorization and self._dev_mode:
            return Caller(role=Role.ADMIN, subject="dev_mode", project=ALL_PROJECTS)
        if authorization == SEVERAL:
            raise TokenInvalid("The request has several authorization headers: send one.", problem=MALFORMED)
        scheme, _, token = authorization.partition(" ")
        if authorization and scheme.lower() != "bearer":
            raise TokenInvalid("The authorization must be of the form `Bearer <token>`.")
        return self._verifier.verify(token.strip())

    def check(self, caller: Caller) -> None:
        """Checks that the caller of an open stream is still authorized.

        Raises:
            TokenInvalid: If the token was revoked.
            Unavailable: If it is no longer valid for another reason; a fresh token may be.
        """
        self._verifier.check(caller)
