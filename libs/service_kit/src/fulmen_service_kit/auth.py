"""Who calls the rpc that runs now, and which roles may call which rpc.

Nothing is open by default: an rpc that the policy does not name is closed to everyone but admins.
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

# Health and reflection tell nothing about anybody's data; probes have no token.
_OPEN_PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.")

_log = structlog.get_logger()

_caller: ContextVar[Caller] = ContextVar("fulmen_caller")


def current_caller() -> Caller:
    """Returns who called the rpc that runs now.

    Raises:
        LookupError: Outside an rpc.
    """
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Binds the caller of the rpc that runs in this context; for the rpc edge and HTTP edges."""
    _caller.set(caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePolicy:
    """Which roles may call what.

    Attributes:
        services: Roles by full service name, such as `fulmen.store.v1.LeaseService`.
        rpcs: Roles by full rpc name, such as `/fulmen.store.v1.LeaseService/StreamLeases`; goes before `services`.
        self_checking: Services whose callers may have no authorization header: their servicers find a token in the
            request and pass it to `Authenticator.identify`. Nothing else may be done before that.
        audited: Administrative rpcs, each with the fields of its request that tell what was asked: paths such as
            `project.name`. Every call of one, refused or not, is a line of the audit log.
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
        """Tells whether the servicer of an rpc finds out itself who calls, if no header says so."""
        return _service_of(rpc) in self.self_checking


def _service_of(rpc: str) -> str:
    return rpc.strip("/").split("/")[0]


class Verifier(Protocol):
    """Knows whose a token is: by the deployment's keys, or by asking the store."""

    async def prepare(self, token: str) -> None:
        """Finds out what `verify` needs to know; raises `Unavailable` if that cannot be had."""

    def verify(self, token: str) -> Caller:
        """Returns whose it is, or raises `TokenInvalid`."""
        ...

    def check(self, caller: Caller) -> None:
        """Raises `TokenInvalid` if the token of a caller was revoked since."""


class Authenticator:
    """Decides whether a call may go on."""

    def __init__(
        self, *, verifier: Verifier, policy: RolePolicy, dev_mode: bool, failures: FailedKeys | None = None
    ) -> None:
        """Takes who knows tokens, what roles may do, and how many bad tokens an address may show; None: any number."""
        self._verifier = verifier
        self._policy = policy
        self._dev_mode = dev_mode
        self._failures = failures
        self._refused = metrics.get_meter("fulmen.auth").create_counter(
            "auth.refused", description="Tokens that were refused, by what was wrong with them."
        )

    @property
    def policy(self) -> RolePolicy:
        """Which roles may call what."""
        return self._policy

    async def admit(self, rpc: str, authorization: str, address: str) -> Caller | None:
        """Returns who calls an rpc from an address, or None where that is open to everybody, or found out by itself.

        What the caller may do is `authorize`'s to say.

        Raises:
            TokenInvalid: There is no good token.
            TooManyInvalidTokens: So it is, and the address has shown too many that this deployment did not make.
            Unavailable: It cannot be found out now whose the token is.
        """
        if rpc.startswith(_OPEN_PREFIXES) or (not authorization and self._policy.is_self_checking(rpc)):
            return None
        await self._verifier.prepare(authorization.partition(" ")[2].strip())
        return self._known(authorization, address)

    def authorize(self, rpc: str, caller: Caller) -> None:
        """Checks that a caller may call an rpc.

        Raises:
            PermissionDenied: The role may not.
        """
        if caller.role is not Role.ADMIN and caller.role not in self._policy.roles(rpc):
            raise PermissionDenied(f"A token of role {caller.role} may not call {rpc}.", role=caller.role)

    def identify(self, rpc: str, authorization: str, address: str) -> Caller:
        """Returns who calls from an address, for a servicer that finds the token in its request.

        Raises:
            TokenInvalid: There is no good token.
            TooManyInvalidTokens: So it is, and the address has shown too many that this deployment did not make.
            PermissionDenied: The role may not call this rpc.
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
        """Checks that a caller whose stream is open may go on.

        Raises:
            TokenInvalid: The token was revoked.
        """
        self._verifier.check(caller)
