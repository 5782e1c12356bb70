"""Signing in and out: `POST`, `GET` and `DELETE /session`, and `POST /session/codes`, all JSON."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Final

from fulmen.errors import ArgumentInvalid, Code, FulmenError, TokenInvalid, Violation
from fulmen_console.gateway.access import Credentials, headers_of, require_same_origin
from fulmen_console.sign_in.codes import CODE_S, SignInCodes
from fulmen_console.sign_in.sessions import MAX_TOKEN_BYTES, Sessions
from fulmen_service_kit.http.wire import (
    Header,
    Receive,
    Scope,
    Send,
    client_address,
    header,
    header_count,
    read_body,
    respond,
)
from fulmen_service_kit.security.auth import SEVERAL
from fulmen_service_kit.security.tokens import Caller

__all__ = ["CODES_PATH", "SESSION_PATH", "SessionApp", "respond_with_error"]

SESSION_PATH: Final = "/session"
CODES_PATH: Final = "/session/codes"
_MAX_BODY_BYTES: Final = 16 * 1024
_BODY_LIMIT_S: Final = 10.0
_METHODS: Final = {SESSION_PATH: ("GET", "POST", "DELETE"), CODES_PATH: ("POST",)}
_STATUS: Final = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}


class SessionApp:
    """Answers the requests of `SESSION_PATH` and `CODES_PATH`."""

    def __init__(self, credentials: Credentials, sessions: Sessions, codes: SignInCodes) -> None:
        self._credentials = credentials
        self._sessions = sessions
        self._codes = codes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        path, method = scope["path"], scope["method"]
        if method not in _METHODS[path]:
            allowed = ", ".join(_METHODS[path]).encode()
            await respond(send, 405, b"", extra=[(b"allow", allowed)], unread=receive)
            return
        try:
            require_same_origin(headers_of(scope))
            status, body, extra = await self._answer(scope, receive)
        except FulmenError as error:
            await respond_with_error(send, error, unread=receive)
            return
        await respond(send, status, json.dumps(body).encode() if body else b"", extra=extra)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any], list[Header]]:
        if scope["path"] == CODES_PATH:
            given = header(scope, b"authorization").decode("latin-1")
            await self._credentials.identify(given, client_address(scope))
            return 200, {"code": self._codes.issue(_bare(given)), "expireSeconds": CODE_S}, []
        if scope["method"] == "DELETE":
            return 200, {}, [_set_cookie(self._sessions.end())]
        if scope["method"] == "GET":
            return 200, _shown(await self.identify(scope)), []
        token = self._token_of(await _json(scope, receive))
        caller = await self._identify(token, scope)
        return 200, _shown(caller), [_set_cookie(self._sessions.begin(token))]

    async def identify(self, scope: Scope) -> Caller:
        """Returns the caller of a request, from its header `Authorization` or its session. Raises FulmenError if there is
        neither."""
        if given := header(scope, b"authorization").decode("latin-1"):
            only = given if header_count(scope, b"authorization") == 1 else SEVERAL
            return await self._credentials.identify(only, client_address(scope))
        session = self._sessions.of_cookie(header(scope, b"cookie").decode("latin-1"))
        return await self._identify("" if session is None else session.token, scope)

    async def _identify(self, token: str, scope: Scope) -> Caller:
        return await self._credentials.identify(f"Bearer {token}" if token else "", client_address(scope))

    def _token_of(self, body: dict[str, Any]) -> str:
        """Returns the token that a person gave, or the one that a code stands for."""
        token, code = body.get("token"), body.get("code")
        if body.keys() - {"token", "code"} or (token is None) is (code is None):
            raise _malformed("must have either `token` or `code`")
        if not isinstance(given := token if code is None else code, str) or len(given) > MAX_TOKEN_BYTES:
            raise _malformed(f"`token` and `code` must be strings of at most {MAX_TOKEN_BYTES} characters")
        if code is None:
            return _bare(given)
        found = self._codes.take(code)
        if found is None:
            raise TokenInvalid(
                "The code is unknown, was already used, or has expired. Open the console with `fulmen open` again."
            )
        return found


async def respond_with_error(send: Send, error: FulmenError, *, unread: Receive | None = None) -> None:
    """Sends an error as the Connect protocol does: code and message."""
    body = {"code": error.code.value.lower(), "message": error.message}
    extra: list[Header] = []
    if error.retry_after_s is not None:
        extra.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
    await respond(send, _STATUS.get(error.code, 500), json.dumps(body).encode(), extra=extra, unread=unread)


async def _json(scope: Scope, receive: Receive) -> dict[str, Any]:
    if header(scope, b"content-type").partition(b";")[0].strip() != b"application/json":
        # Forms of other sites can send other types without asking first.
        raise _malformed("must have the content type application/json")
    try:
        async with asyncio.timeout(_BODY_LIMIT_S):
            body = json.loads(await read_body(scope, receive, _MAX_BODY_BYTES))
    except TimeoutError:
        raise _malformed("did not arrive in time") from None
    except (ValueError, RecursionError):
        raise _malformed("is not JSON") from None
    if not isinstance(body, dict):
        raise _malformed("is not a JSON object")
    return body


def _malformed(problem: str) -> ArgumentInvalid:
    return ArgumentInvalid(f"The body {problem}.", violations=[Violation(field="body", description=problem)])


def _bare(text: str) -> str:
    return text.strip().removeprefix("Bearer ").strip()


def _set_cookie(cookie: str) -> Header:
    return b"set-cookie", cookie.encode("latin-1")


def _shown(caller: Caller) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": caller.role.value, "subject": caller.subject, "project": caller.project}
    if math.isfinite(caller.expires_s):
        shown["expireUnixSeconds"] = int(caller.expires_s)
    return shown
