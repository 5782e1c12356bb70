"""Who calls the rpc that runs now, and which roles may call which rpc.

Nothing is open by default: an rpc that the policy does not name is closed to everyone but admins.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from fulmen.errors import PermissionDenied, TokenInvalid
from fulmen.ids import ALL_PROJECTS
from fulmen_service_kit.tokens import Caller, Role, TokenVerifier

# Health and reflection tell nothing about anybody's data; probes have no token.
_OPEN_PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.")

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
    """

    services: Mapping[str, frozenset[Role]]
    rpcs: Mapping[str, frozenset[Role]]

    def roles(self, rpc: str) -> frozenset[Role]:
        """Returns the roles that may call an rpc, besides ADMIN."""
        if rpc in self.rpcs:
            return self.rpcs[rpc]
        return self.services.get(rpc.strip("/").split("/")[0], frozenset())


class Authenticator:
    """Decides whether a call may go on."""

    def __init__(self, *, verifier: TokenVerifier, policy: RolePolicy, dev_mode: bool) -> None:
        self._verifier = verifier
        self._policy = policy
        self._dev_mode = dev_mode

    def authenticate(self, rpc: str, authorization: str) -> Caller | None:
        """Returns the caller, or None for the rpcs that are open to everybody.

        Raises:
            TokenInvalid: There is no good token.
            PermissionDenied: The role may not call this rpc.
        """
        if rpc.startswith(_OPEN_PREFIXES):
            return None
        if not authorization and self._dev_mode:
            return Caller(role=Role.ADMIN, subject="dev_mode", project=ALL_PROJECTS)
        scheme, _, token = authorization.partition(" ")
        if authorization and scheme.lower() != "bearer":
            raise TokenInvalid("The authorization must be of the form `Bearer <token>`.")
        caller = self._verifier.verify(token.strip())
        if caller.role is not Role.ADMIN and caller.role not in self._policy.roles(rpc):
            raise PermissionDenied(f"A token of role {caller.role} may not call {rpc}.", role=caller.role)
        return caller

    def check(self, caller: Caller) -> None:
        """Checks that a caller whose stream is open may go on.

        Raises:
            TokenInvalid: The token was revoked.
        """
        self._verifier.check(caller)
