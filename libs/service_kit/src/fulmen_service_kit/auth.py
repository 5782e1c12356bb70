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
        self_checking: Services whose callers may have no authorization header: their servicers find a token in the
            request and pass it to `Authenticator.identify`. Nothing else may be done before that.
    """

    services: Mapping[str, frozenset[Role]]
    rpcs: Mapping[str, frozenset[Role]]
    self_checking: frozenset[str] = frozenset()

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


class Authenticator:
    """Decides whether a call may go on."""

    def __init__(self, *, verifier: TokenVerifier, policy: RolePolicy, dev_mode: bool) -> None:
        self._verifier = verifier
        self._policy = policy
        self._dev_mode = dev_mode

    def authenticate(self, rpc: str, authorization: str) -> Caller | None:
        """Returns the caller, or None for the rpcs that are open to everybody or find out themselves.

        Raises:
            TokenInvalid: There is no good token.
            PermissionDenied: The role may not call this rpc.
        """
        if rpc.startswith(_OPEN_PREFIXES) or (not authorization and self._policy.is_self_checking(rpc)):
            return None
        return self.identify(rpc, authorization)

    def identify(self, rpc: str, authorization: str) -> Caller:
        """Returns the caller of an rpc that is not open.

        Raises:
            TokenInvalid: There is no good token.
            PermissionDenied: The role may not call this rpc.
        """
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
