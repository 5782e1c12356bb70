"""Who calls: the token in the header `Authorization`, or the one in the session of a browser."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, Protocol

import structlog
from connectrpc.errors import ConnectError
from connectrpc.request import Headers, RequestContext

from fulmen.errors import FulmenError, InternalError, PermissionDenied
from fulmen_console.gateway.wire_errors import connect_error
from fulmen_console.sign_in.sessions import Sessions
from fulmen_service_kit.http.wire import Scope
from fulmen_service_kit.security.auth import SEVERAL
from fulmen_service_kit.security.tokens import Caller

__all__ = ["Access", "Credentials", "authorization", "headers_of", "require_same_origin"]

_authorization: ContextVar[str] = ContextVar("fulmen_console_authorization", default="")

_log = structlog.get_logger()
_OWN_SITES: Final = frozenset({"", "same-origin", "none"})


def authorization() -> str:
    """Returns the authorization of the current call; empty in dev mode without a token."""
    return _authorization.get()


class Credentials(Protocol):
    """What verifies tokens; see `Authenticator` of the service kit."""

    async def identify(self, authorization: str, address: str) -> Caller:
        """Returns the caller. Raises TokenInvalid, TooManyInvalidTokens or Unavailable."""
        ...


class Access:
    """Authenticates each call before its request is read. Forged tokens go no further: services limit them by address."""

    def __init__(self, credentials: Credentials, sessions: Sessions) -> None:
        self._credentials = credentials
        self._sessions = sessions

    async def on_start(self, ctx: RequestContext) -> None:
        """Authenticates a call; its authorization is afterwards set in the current context.

        Raises:
            ConnectError: If the token is missing or invalid, or a page of another site used the session.
        """
        headers = ctx.request_headers
        given = _given(headers)
        try:
            if not given:
                session = self._sessions.of_cookie(headers.get("cookie", ""))
                if session is not None:
                    require_same_origin(headers)
                    given = f"Bearer {session.token}"
                    renewed = self._sessions.renewed(session)
                    if renewed:
                        ctx.response_headers["set-cookie"] = renewed
            await self._credentials.identify(given, _address(ctx))
        except FulmenError as error:
            raise connect_error(error) from None
        _authorization.set(given)

    async def on_end(self, token: None, ctx: RequestContext, error: Exception | None, /) -> None:
        """Forgets the authorization.

        Raises:
            ConnectError: Instead of an error of the console itself, whose text is for its log alone.
        """
        _authorization.set("")
        if error is not None and not isinstance(error, ConnectError):
            _log.error("rpc_failed", rpc=ctx.method.name, exc_info=error)
            raise connect_error(InternalError("The console failed; see its log."))


def require_same_origin(headers: Headers) -> None:
    """Checks that no page of another site makes a browser use its session.

    Source: the Fetch standard's `Origin` and Fetch Metadata's `Sec-Fetch-Site`. The cookie itself is SameSite=Strict.

    Raises:
        PermissionDenied: If one does.
    """
    origin = headers.get("origin", "")
    is_own = not origin or origin.partition("://")[2].lower() == headers.get("host", "").lower()
    if not is_own or headers.get("sec-fetch-site", "") not in _OWN_SITES:
        raise PermissionDenied("A page of another site cannot use a session of the console. Send a token instead.")


def headers_of(scope: Scope) -> Headers:
    """Returns the headers of a request of ASGI."""
    return Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])


def _given(headers: Headers) -> str:
    values = [value for name, value in headers.allitems() if name == "authorization"]
    return SEVERAL if len(values) > 1 else next(iter(values), "")


def _address(ctx: RequestContext) -> str:
    return (ctx.client_address or "").rpartition(":")[0]
