"""Who calls, by the token in the request's headers."""

from __future__ import annotations

from fulmen.errors import PermissionDenied, TokenInvalid
from fulmen.ids import ALL_PROJECTS
from fulmen_llm_proxy.domain.call import Attribution, Caller
from fulmen_service_kit.http_wire import Scope, header
from fulmen_service_kit.tokens import Caller as TokenCaller
from fulmen_service_kit.tokens import Role, TokenVerifier

_MAY_CALL = frozenset({Role.ATTEMPT, Role.CLIENT, Role.SERVICE, Role.ADMIN})


class HttpAuthenticator:
    """Verifies `Authorization: Bearer <token>` (the OpenAI clients' way) or `x-api-key` (Anthropic's)."""

    def __init__(self, *, verifier: TokenVerifier, dev_mode: bool) -> None:
        self._verifier = verifier
        self._dev_mode = dev_mode

    def authenticate(self, scope: Scope) -> TokenCaller:
        """Returns whose token it is.

        Raises:
            TokenInvalid: There is no good token.
            PermissionDenied: The token is good, but not for model calls.
        """
        token = _token(scope)
        if not token and self._dev_mode:
            return TokenCaller(role=Role.ADMIN, subject="dev_mode", project=ALL_PROJECTS)
        caller = self._verifier.verify(token)
        if caller.role not in _MAY_CALL:
            raise PermissionDenied(f"A token of role {caller.role} may not call models.", role=caller.role)
        return caller


def caller_of(token: TokenCaller) -> Caller:
    """Returns who calls, and the attempt that the calls belong to; None for everybody but an agent."""
    attribution = None
    if token.attempt is not None:
        attribution = Attribution(
            attempt=str(token.attempt),
            project=token.project,
            epoch=token.epoch,
            mode=token.mode,
            expires_s=token.expires_s,
            token_budget=token.token_budget,
        )
    return Caller(project=token.own_project, attribution=attribution)


def _token(scope: Scope) -> str:
    authorization = header(scope, b"authorization")
    if not authorization:
        return header(scope, b"x-api-key").decode("latin-1").strip()
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        raise TokenInvalid("The authorization must be of the form `Bearer <token>`.")
    return token.decode("latin-1").strip()
