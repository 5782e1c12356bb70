"""Authentication and authorization of rpcs.

Invariant: an rpc that the policy does not name is open to admins only.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from opentelemetry import metrics

from fulmen.errors import PermissionDenied, TokenInvalid, TooManyInvalidTokens
from fulmen.ids import ALL_PROJECTS
from fulmen_service_kit.failed_keys import FailedKeys
from fulmen_service_kit.tokens import FORGED, Caller, Role

# Health and reflection expose no data; probes have no token.
_OPEN_PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.")

_log = structlog.get_logger()

_caller: ContextVar[Caller] = ContextVar("fulmen_caller")


def current_caller() -> Caller:
    """Returns the caller of the current rpc.

    Raises:
        LookupError: Outside an rpc.
    """
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Sets the caller in this context; for the rpc and HTTP edges."""
    _caller.set(caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePolicy:
    """Roles that may call each service and rpc.

    Attributes:
        services: Roles by full service name, such as `fulmen.store.v1.LeaseService`.
        rpcs: Roles by full rpc name, such as `/fulmen.store.v1.LeaseService/StreamLeases`; overrides `services`.
        self_checking: Services that accept calls without an authorization header. Their servicers read a token from the
            request and must call `Authenticator.identify` first.
        audited: Administrative rpcs with the request fields to write to the audit log, paths such as `project.name`.
    """

    services: Mapping[str, frozenset[Role]]
    rpcs: Mapping[str, frozenset[Role]]
    self_checking: frozenset[str] = frozenset()
    audited: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def roles(self, rpc: str) -> frozenset[Role]:
        """Returns the roles that may call an rpc, besides ADMIN."""
        if rpc in self.rpcs:
            return self.rpcs[rpc]
        return self.services.get(_service_of(rpc), frozenset())

    def is_self_checking(self, rpc: str) -> bool:
        """Returns True if the servicer of an rpc authenticates calls without a header itself."""
        return _service_of(rpc) in self.self_checking


def _service_of(rpc: str) -> str:
    return rpc.strip("/").split("/")[0]


class Verifier(Protocol):
    """Verifies tokens. Implementations: `TokenVerifier` with the deployment's keys, `StoreVerifier` with an rpc."""

    async def prepare(self, token: str) -> None:
        """Loads what `verify` needs. Raises Unavailable."""

    def verify(self, token: str) -> Caller:
        """Returns the token's caller. Raises TokenInvalid."""
        ...

    def check(self, caller: Caller) -> None:
        """Raises TokenInvalid if the caller's token was revoked since."""


class Authenticator:
    """Authenticates and authorizes calls."""

    def __init__(
        self, *, verifier: Verifier, policy: RolePolicy, dev_mode: bool, failures: FailedKeys | None = None
    ) -> None:
        """Initializes the authenticator.

        Args:
            verifier: Verifies tokens.
            policy: Roles by rpc.
            dev_mode: Whether calls without a token are those of an admin.
            failures: Limits forged tokens by address; None for no limit.
        """
        self._verifier = verifier
        self._policy = policy
        self._dev_mode = dev_mode
        self._failures = failures
        self._refused = metrics.get_meter("fulmen.auth").create_counter(
            "auth.refused", description="Rejected tokens by problem."
        )

    @property
    def policy(self) -> RolePolicy:
        """Roles by rpc."""
        return self._policy

    async def admit(self, rpc: str, authorization: str, address: str) -> Caller | None:
        """Authenticates a call; returns None if the rpc is open to everyone or authenticates calls itself.

        Raises:
            TokenInvalid: If the token is missing or invalid.
            TooManyInvalidTokens: If it is forged and the address has exceeded its limit.
            Unavailable: If the token cannot be verified now.
        """
        if rpc.startswith(_OPEN_PREFIXES) or (not authorization and self._policy.is_self_checking(rpc)):
            return None
        await self._verifier.prepare(authorization.partition(" ")[2].strip())
        return self._known(authorization, address)

    def authorize(self, rpc: str, caller: Caller) -> None:
        """Checks that a caller may call an rpc.

        Raises:
            PermissionDenied: If its role may not.
        """
        if caller.role is not Role.ADMIN and caller.role not in self._policy.roles(rpc):
            raise PermissionDenied(f"A token of role {caller.role} may not call {rpc}.", role=caller.role)

    def identify(self, rpc: str, authorization: str, address: str) -> Caller:
        """Authenticates and authorizes a call, for a servicer that reads the token from its request.

        Raises:
            TokenInvalid: If the token is missing or invalid.
            TooManyInvalidTokens: If it is forged and the address has exceeded its limit.
            PermissionDenied: If its role may not call this rpc.
        """
        caller = self._known(authorization, address)
        self.authorize(rpc, caller)
        return caller

    def _known(self, authorization: str, address: str) -> Caller:
        try:
            return self._verified(authorization)
        except TokenInvalid as error:
            problem = error.metadata.get("problem", "")
            self._refused.add(1, {"problem": problem})
            wait_s = self._failures.failed(address) if self._failures is not None and problem == FORGED else 0.0
            if not wait_s:
                raise
            _log.warning("too_many_bad_tokens", address=address)
            raise TooManyInvalidTokens(
                "Too many tokens of this address were not made by this deployment.", retry_after_s=wait_s
            ) from None

    def _verified(self, authorization: str) -> Caller:
        if not authorization and self._dev_mode:
            return Caller(role=Role.ADMIN, subject="dev_mode", project=ALL_PROJECTS)
        scheme, _, token = authorization.partition(" ")
        if authorization and scheme.lower() != "bearer":
            raise TokenInvalid("The authorization must be of the form `Bearer <token>`.")
        return self._verifier.verify(token.strip())

    def check(self, caller: Caller) -> None:
        """Checks that the caller of an open stream is still authorized.

        Raises:
            TokenInvalid: If the token was revoked.
        """
        self._verifier.check(caller)
