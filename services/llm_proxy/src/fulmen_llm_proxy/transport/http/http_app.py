"""The ASGI application: dispatches requests by path, and turns errors into answers."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from fulmen.errors import Draining, FulmenError, InternalError, Unavailable
from fulmen.ids import AttemptName, is_conversation_id
from fulmen_llm_proxy.apis.api import Api, Dialect, encode
from fulmen_llm_proxy.apis.errors import error_document
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.attempts.cache import AttemptCache
from fulmen_llm_proxy.attempts.caller import Caller, caller_of
from fulmen_llm_proxy.backends.headers import to_backend
from fulmen_llm_proxy.calls.answer_writer import Header
from fulmen_llm_proxy.calls.failures import BODY_UNREAD, Refused, call_error, headers_of, status_of
from fulmen_llm_proxy.calls.pipeline import CallPipeline
from fulmen_llm_proxy.calls.request_buffer import BufferShare, RequestBuffer
from fulmen_llm_proxy.calls.running_call import MAX_AGENT_NAME, CallHead
from fulmen_llm_proxy.capture.span_place import new_span_id, trace_of
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.transport.http import effects, stored_responses
from fulmen_llm_proxy.transport.http.auth import HttpAuthenticator
from fulmen_llm_proxy.transport.http.effects import Effects
from fulmen_llm_proxy.transport.http.passed_on import PassedOn
from fulmen_llm_proxy.transport.http.paths import RequestPath, parse_path, with_model
from fulmen_llm_proxy.transport.http.stored_responses import StoredResponses
from fulmen_service_kit.http.wire import (
    BODY_CAME,
    CallerGone,
    DisconnectWatch,
    Message,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    respond,
)
from fulmen_service_kit.observability.logs import places_of
from fulmen_service_kit.security.project_limits import ProjectShare
from fulmen_service_kit.security.tokens import Caller as TokenCaller

_GET = ("GET",)
_MODELS = "/v1/models"
_MODEL = "/v1/models/"
HEALTH_PATHS = ("/healthz", "/readyz")
_OF_CALLERS = (_MODELS, stored_responses.ROOT, effects.PATH)
_METHODS = {
    **dict.fromkeys((*BY_PATH, effects.PATH), ("POST",)),
    **dict.fromkeys((_MODELS, *HEALTH_PATHS), _GET),
}
SERVED = ", ".join(f"{method} {path}" for path, methods in _METHODS.items() for method in methods)
_AGENT_HEADER = b"x-fulmen-agent"
_CONVERSATION_HEADER = b"x-fulmen-conversation"
# Set by clients that vendors generate with Stainless: 1 in the second try, and so on.
_RESEND_HEADER = b"x-stainless-retry-count"
_TIMEOUT_HEADERS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
"""How long the same clients wait for an answer, seconds."""
_ID_HEADER = b"x-fulmen-request-id"
_VENDORS_ID_HEADERS = {Dialect.OPENAI: b"x-request-id", Dialect.ANTHROPIC: b"request-id"}
"""Where vendors' clients look for the id of a request. One that the backend sent stays."""
_TEXT = b"text/plain; charset=utf-8"
_REQUEST_ID = "fulmen.request_id"
"""Scope key of the id of a request."""
_STARTED = "fulmen.answer_started"
"""Scope key of a request whose answer has started."""
_BODY_READ = "fulmen.body_read"
"""Scope key of a request whose body was read to its end."""
_SMALL_BODY_BYTES = 64 * 1024
"""A body up to this size has arrived, or is about to, when its request is refused."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one HTTP request.

    Attributes:
        max_bytes: largest request body; a larger one gets 413.
        timeout_s: time within which the body must arrive, seconds; then 408.
        buffer: memory for the bodies of all requests.
    """

    max_bytes: int
    timeout_s: float
    buffer: RequestBuffer


class HttpApp:
    """Answers HTTP requests; the only place that turns an unexpected exception into an answer."""

    def __init__(
        self,
        *,
        authenticator: HttpAuthenticator,
        attempts: AttemptCache,
        calls: CallPipeline,
        stored: StoredResponses,
        declared: Effects,
        passed_on: PassedOn,
        limits: RequestLimits,
        tables: TableHolder,
    ) -> None:
        self._authenticator = authenticator
        self._attempts = attempts
        self._calls = calls
        self._stored = stored
        self._declared = declared
        self._passed_on = passed_on
        self._limits = limits
        self._tables = tables
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            return
        path = parse_path(scope["path"])
        send = _identified(scope, dialect_of(scope, path.api), send)
        try:
            await self._dispatch(path, scope, receive, send)
        except CallerGone:
            return
        except (FulmenError, Refused) as error:
            unread = receive if status_of(error) in BODY_UNREAD or _is_uploading(scope) else None
            await _refuse(path, scope, send, error, unread)
        except Exception as error:  # noqa: BLE001 - the edge: no text of an unknown error leaves the process
            error_id = uuid.uuid4().hex[:12]
            trace_id = trace_of(header(scope, b"traceparent").decode("latin-1"))
            details = {"error_id": error_id, "request_id": scope[_REQUEST_ID], "error": places_of(error)}
            _log.error("call_failed_unexpectedly", path=scope["path"], trace_id=trace_id, **details)
            if _STARTED not in scope:
                internal = InternalError(f"Internal error. Quote id {error_id}.", error_id=error_id)
                await _refuse(path, scope, send, internal)
            else:
                await send({"type": "http.response.body", "body": b""})

    async def _dispatch(self, path: RequestPath, scope: Scope, receive: Receive, send: Send) -> None:
        name = path.api
        methods = _METHODS.get(name) or _methods_below(name) or self._passed_on.methods(name)
        if methods is None or scope["method"] not in methods:
            await self._authenticator.hold(scope)
        if methods is None:
            raise Refused(404, "path_not_found", f"Path {name[:200]} not found. Served: {SERVED}.")
        if scope["method"] not in methods:
            raise Refused(405, "method_not_allowed", f"{name[:200]} allows only {' and '.join(methods)}.")
        if name in BY_PATH or name.startswith(_OF_CALLERS) or self._passed_on.methods(name):
            await self._serve(path, scope, receive, send)
        elif name == "/healthz":
            await respond(send, 503 if self.draining else 200, b"draining" if self.draining else b"ok", _TEXT)
        else:
            missing = b"draining" if self.draining else b"" if self._tables.is_loaded else b"routes not loaded"
            await respond(send, 503 if missing else 200, missing or b"ok", _TEXT)

    async def _serve(self, path: RequestPath, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that needs a key, within the limits of the key's project."""
        name, attempt = path.api, path.attempt()
        api = BY_PATH.get(name)
        if api is not None and self.draining:
            raise Draining("The proxy is shutting down; try again.")
        try:
            token = await self._authenticator.authenticate(scope)
        except Unavailable as error:
            self._calls.reject(error.metadata.get("attempt", ""), error)
            raise
        with await self._authenticator.admit(token) as share:
            # First: a call that is not allowed costs as much.
            self._authenticator.authorize(token, for_attempt=attempt is not None)
            caller = await self._caller(token, attempt)
            receive, send = _charged(receive, send, share)
            if api is not None:
                await share.timed(self._call(api, path, caller, scope, receive, send))
            elif name.startswith(_MODELS):
                await respond(send, 200, await self._models(name, caller, dialect_of(scope, name)))
            elif name == effects.PATH:
                await share.timed(self._effect(caller, scope, receive, send))
            elif name.startswith(stored_responses.ROOT):
                await self._stored.answer(scope, name, caller, send)
            else:
                self._passed_on.allow(name, caller)
                await share.timed(self._pass_on(name, caller, scope, receive, send))

    async def _call(
        self, api: Api, path: RequestPath, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serves a model call."""
        with self._limits.buffer.share() as share:
            try:
                body = await self._body(scope, receive, share)
            except Refused as error:
                self._calls.reject(caller.attempt, error)
                raise
            if path.deployment:
                body = with_model(body, path.deployment)
            await self._calls.run(api, caller, _head(scope), body, _AnswerWriter(scope, send))

    async def _effect(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers for a side effect that an agent declares."""
        with self._limits.buffer.share() as share:
            body = await self._body(scope, receive, share)
        await respond(send, 200, await self._declared.answer(caller, body))

    async def _pass_on(self, path: str, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on a request that is not a model call's."""
        with self._limits.buffer.share() as share:
            body = await self._body(scope, receive, share)
            await self._passed_on.answer(scope, path, caller, body, _AnswerWriter(scope, send))

    async def _body(self, scope: Scope, receive: Receive, share: BufferShare) -> bytes:
        """Returns the body of a request, whose memory its share of the buffer holds.

        Raises:
            Refused: if it does not arrive in time, or there is no memory for it.
        """
        declared_bytes = _declared_bytes(scope)
        if declared_bytes <= self._limits.max_bytes:
            share.require(declared_bytes)
        # Most bodies arrive with their headers; a timer for those would cost a hundredth of their call.
        reading = read_body(scope, receive, self._limits.max_bytes, share.reserve)
        body = await (reading if BODY_CAME in scope else _within(self._limits.timeout_s, reading))
        scope[_BODY_READ] = True
        return body

    async def _caller(self, token: TokenCaller, attempt: AttemptName | None) -> Caller:
        """Returns the caller, by its key and by the attempt that the path may name."""
        if attempt is None or token.attempt == attempt:
            return caller_of(token)
        attribution = await self._attempts.attribution(attempt, token)
        project = attribution.project
        return Caller(project=project, models_of=project, attribution=attribution, key_id=token.token_id)

    async def _models(self, path: str, caller: Caller, dialect: Dialect) -> bytes:
        """Returns the models that a caller may use, or the one that the path names.

        Raises:
            RouteNotFound: if that model is not served.
        """
        if path == _MODELS:
            return _model_list(self._tables.current.models(caller.models_of), dialect)
        name = path.removeprefix(_MODEL)
        route = self._tables.current.resolved(name, caller.models_of)
        await self._calls.await_route(route, caller)
        self._tables.current.route(route, caller.models_of)
        return encode(_model(name, dialect))


def _identified(scope: Scope, dialect: Dialect, send: Send) -> Send:
    """Assigns an id to a request; returns ASGI's function that sends an answer, which adds the id to every answer."""
    scope[_REQUEST_ID] = new_span_id()
    value, vendors = scope[_REQUEST_ID].encode(), _VENDORS_ID_HEADERS[dialect]

    def sent(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            names = [_ID_HEADER] if any(name == vendors for name, _ in message["headers"]) else [_ID_HEADER, vendors]
            message["headers"] = [*message["headers"], *((name, value) for name in names)]
        return send(message)

    return sent


def _charged(receive: Receive, send: Send, share: ProjectShare) -> tuple[Receive, Send]:
    """Returns ASGI's two functions, which charge a project for the bytes of bodies and answers as they come."""

    async def received() -> Message:
        message = await receive()
        share.charge(len(message.get("body", b"")))
        return message

    def sent(message: Message) -> Awaitable[None]:
        share.charge(len(message.get("body", b"")))
        return send(message)

    return received, sent


async def _within(timeout_s: float, reading: Coroutine[Any, Any, bytes]) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            return await reading
    except TimeoutError:
        raise Refused(408, "request_timeout", "The request body did not arrive in time.") from None


def _declared_bytes(scope: Scope) -> int:
    """Returns the request's `content-length`; 0 without one."""
    declared = header(scope, b"content-length")
    return int(declared) if declared.isdigit() else 0


def _is_uploading(scope: Scope) -> bool:
    """Returns whether a large part of the body may still arrive, because its sender does not wait for 100-continue."""
    if _BODY_READ in scope or header(scope, b"expect"):
        return False
    return _declared_bytes(scope) > _SMALL_BODY_BYTES or bool(header(scope, b"transfer-encoding"))


def _methods_below(path: str) -> tuple[str, ...] | None:
    """Returns the methods of a path that names a model or a stored response; None for any other path."""
    if path.startswith(_MODEL):
        return _GET
    return stored_responses.methods_of(path) if path.startswith(stored_responses.ROOT) else None


def dialect_of(scope: Scope, path: str) -> Dialect:
    """Returns the dialect that a request expects: its API's, otherwise that of the vendor's client that sent it."""
    api = BY_PATH.get(path)
    if api is not None:
        return api.dialect
    return Dialect.ANTHROPIC if header(scope, b"anthropic-version") else Dialect.OPENAI


def _head(scope: Scope) -> CallHead:
    pass_on = to_backend(scope["headers"])
    resent = header(scope, _RESEND_HEADER)
    conversation = header(scope, _CONVERSATION_HEADER).decode("latin-1")
    return CallHead(
        request_id=scope[_REQUEST_ID],
        trace_parent=pass_on.get("traceparent", ""),
        agent_name=header(scope, _AGENT_HEADER).decode("latin-1")[:MAX_AGENT_NAME],
        resend_count=int(resent) if resent.isdigit() and len(resent) < 4 else 0,
        pass_on=pass_on,
        conversation=conversation if is_conversation_id(conversation) else "",
        timeout_s=_timeout_s(scope),
    )


def _timeout_s(scope: Scope) -> float | None:
    """Returns how long the caller waits for its answer, as its client states it, seconds; None if it does not."""
    for name in _TIMEOUT_HEADERS:
        try:
            timeout_s = float(header(scope, name))
        except ValueError:
            continue
        if 0 < timeout_s < math.inf:
            return timeout_s
    return None


async def _refuse(
    path: RequestPath, scope: Scope, send: Send, error: FulmenError | Refused, unread: Receive | None = None
) -> None:
    """Answers with an error before any byte of an answer was sent.

    Args:
        unread: receives the rest of the request's body.
    """
    reported = call_error(error)
    document = error_document(reported, dialect_of(scope, path.api))
    extra = headers_of(error)
    # After `expect: 100-continue` the client may skip the body; its next request would be read as that body.
    if reported.status not in BODY_UNREAD and (unread is not None or header(scope, b"expect")):
        extra.append((b"connection", b"close"))
    await respond(send, reported.status, document, extra=extra, unread=unread)


class _AnswerWriter:
    """Writes the answer of one HTTP request over ASGI."""

    __slots__ = ("_scope", "_send")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send

    def watch(self) -> DisconnectWatch:
        """Returns a watch for the caller's disconnect."""
        return DisconnectWatch(self._scope)

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Writes a complete answer."""
        self._scope[_STARTED] = True
        await respond(self._send, status, body, content_type, extra)

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Writes the headers of a stream."""
        self._scope[_STARTED] = True
        headers = [(b"content-type", content_type), (b"cache-control", b"no-cache"), *extra]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def piece(self, data: bytes) -> Awaitable[None]:
        """Writes events."""
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends the stream."""
        await self._send({"type": "http.response.body", "body": b""})


def _model_list(names: Iterable[str], dialect: Dialect) -> bytes:
    """Returns the served models on one page, in the format of a vendor; their creation time is unknown: 1970."""
    models = [_model(name, dialect) for name in names]
    if dialect is Dialect.ANTHROPIC:
        edges = {"first_id": models[0]["id"] if models else None, "last_id": models[-1]["id"] if models else None}
        return encode({"data": models, "has_more": False, **edges})
    return encode({"object": "list", "data": models})


def _model(name: str, dialect: Dialect) -> dict[str, object]:
    if dialect is Dialect.ANTHROPIC:
        fields = {"display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
        return {"type": "model", "id": name, **fields}
    return {"id": name, "object": "model", "created": 0, "owned_by": "fulmen"}
