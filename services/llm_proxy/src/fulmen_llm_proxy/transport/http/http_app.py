"""The ASGI application: which path is answered by whom, and what every other path is told."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from fulmen.errors import Draining, FulmenError, InternalError
from fulmen_llm_proxy.apis.api import Api, Dialect
from fulmen_llm_proxy.apis.errors import error_document
from fulmen_llm_proxy.apis.models import model_document, model_list
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.attempts.book import AttemptBook
from fulmen_llm_proxy.attempts.caller import Caller, caller_of
from fulmen_llm_proxy.attempts.guard import AttemptGuard
from fulmen_llm_proxy.backends.headers import to_backend
from fulmen_llm_proxy.calls.body_room import BodyRoom
from fulmen_llm_proxy.calls.failures import BODY_UNREAD, Refused, call_error, headers_of, status_of
from fulmen_llm_proxy.calls.pipeline import CallPipeline
from fulmen_llm_proxy.calls.running_call import MAX_AGENT_NAME, CallHead
from fulmen_llm_proxy.capture.span_place import trace_of
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.transport.http import kept_responses
from fulmen_llm_proxy.transport.http.auth import HttpAuthenticator
from fulmen_llm_proxy.transport.http.azure import deployment_in, standard_path, with_model
from fulmen_llm_proxy.transport.http.http_sink import STARTED, HttpSink
from fulmen_llm_proxy.transport.http.kept_responses import KeptResponses
from fulmen_llm_proxy.transport.http.metrics_page import MetricsPage
from fulmen_llm_proxy.transport.http.paths import attempt_in, without_attempt
from fulmen_service_kit.http_wire import BODY_CAME, CallerGone, Receive, Scope, Send, header, read_body, respond
from fulmen_service_kit.logs import places_of

_GET = ("GET",)
_MODELS = "/v1/models"
_MODEL = "/v1/models/"
_METHODS = {
    **dict.fromkeys(BY_PATH, ("POST",)),
    **dict.fromkeys((_MODELS, "/healthz", "/readyz", "/metrics"), _GET),
}
SERVED = ", ".join(f"{method} {path}" for path, methods in _METHODS.items() for method in methods)
_AGENT_HEADER = b"x-fulmen-agent"
# Set by the clients that vendors generate: their second try has 1, and so on.
_RESEND_HEADER = b"x-stainless-retry-count"
_TEXT = b"text/plain; charset=utf-8"
_BODY_READ = "fulmen.body_read"
"""In the scope of a request whose body was read to its end."""
_SMALL_BODY_BYTES = 64 * 1024
"""A body up to this size is here, or will be at once, when its request is refused."""

_log = structlog.get_logger(__name__)


class Door:
    """Answers HTTP; the only place that turns an unexpected exception into an answer."""

    def __init__(
        self,
        *,
        authenticator: HttpAuthenticator,
        attempts: AttemptBook,
        calls: CallPipeline,
        kept: KeptResponses,
        guard: AttemptGuard,
        tables: TableHolder,
        metrics: MetricsPage,
        room: BodyRoom,
        max_request_bytes: int,
        request_timeout_s: float,
    ) -> None:
        """Takes what the paths lead to.

        Args:
            max_request_bytes: largest request body; a larger one is answered 413.
            request_timeout_s: longest time for a request's body to arrive, seconds; then 408.
        """
        self._authenticator = authenticator
        self._attempts = attempts
        self._calls = calls
        self._kept = kept
        self._guard = guard
        self._room = room
        self._max_request_bytes = max_request_bytes
        self._request_timeout_s = request_timeout_s
        self._tables = tables
        self._metrics = metrics
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            return
        try:
            await self._dispatch(scope, receive, send)
        except CallerGone:
            return
        except (FulmenError, Refused) as error:
            unread = receive if status_of(error) in BODY_UNREAD or _is_uploading(scope) else None
            await _refuse(scope, send, error, unread)
        except Exception as error:  # noqa: BLE001 - the edge: no text of an unknown error leaves the process
            error_id = uuid.uuid4().hex[:12]
            trace_id = trace_of(header(scope, b"traceparent").decode("latin-1"))
            told = {"error_id": error_id, "error": places_of(error)}
            _log.error("call_failed_unexpectedly", path=scope["path"], trace_id=trace_id, **told)
            if STARTED not in scope:
                await _refuse(scope, send, InternalError(f"Internal error. Quote id {error_id}.", error_id=error_id))
            else:
                await send({"type": "http.response.body", "body": b""})

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = standard_path(without_attempt(scope["path"]))
        expected = _METHODS.get(path) or _methods_below(path)
        if expected is None:
            raise Refused(404, "path_not_found", f"There is nothing at {path[:200]}. Served: {SERVED}.")
        if scope["method"] not in expected:
            raise Refused(405, "method_not_allowed", f"{path[:200]} answers {' and '.join(expected)} only.")
        api = BY_PATH.get(path)
        if api is not None:
            await self._call(api, scope, receive, send)
        elif path.startswith(_MODELS):
            await self._caller(scope)
            await respond(send, 200, self._models(path, dialect_of(scope, path)))
        elif path.startswith(kept_responses.ROOT):
            caller = await self._caller(scope)
            if caller.attribution is not None:
                self._guard.require(caller.attribution)
            await self._kept.answer(scope, path, caller.project, send)
        elif path == "/healthz":
            await respond(send, 503 if self.draining else 200, b"draining" if self.draining else b"ok", _TEXT)
        elif path == "/readyz":
            missing = b"draining" if self.draining else b"" if self._tables.is_loaded else b"no routes heard yet"
            await respond(send, 503 if missing else 200, missing or b"ok", _TEXT)
        else:
            page = await self._metrics.render(own_only=scope["query_string"] == b"own=1")
            await respond(send, 200, page, CONTENT_TYPE_LATEST.encode())

    async def _call(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        if self.draining:
            raise Draining("The proxy is shutting down; try again.")
        caller = await self._caller(scope)
        with self._room.held() as held:
            try:
                declared_bytes = _declared_bytes(scope)
                if declared_bytes <= self._max_request_bytes:
                    held.require(declared_bytes)
                # Most bodies came with their heads: the timer of a deadline would be a hundredth of their calls' cost.
                deadline_s = None if BODY_CAME in scope else self._request_timeout_s
                body = await _within(deadline_s, read_body(scope, receive, self._max_request_bytes, held.take))
            except TimeoutError:
                raise Refused(408, "request_timeout", "The request's body did not arrive in time.") from None
            except Refused as error:
                self._calls.note_refused(caller, error)
                raise
            scope[_BODY_READ] = True
            deployment = deployment_in(without_attempt(scope["path"]))
            if deployment:
                body = with_model(body, deployment)
            await self._calls.run(api, caller, _head(scope), body, HttpSink(scope, send))

    async def _caller(self, scope: Scope) -> Caller:
        """Returns who calls, by the key and by the attempt that the URL may name."""
        attempt = attempt_in(scope["path"])
        token = self._authenticator.authenticate(scope, for_attempt=attempt is not None)
        if attempt is None or token.attempt == attempt:
            return caller_of(token)
        attribution = await self._attempts.attribution(attempt, token)
        return Caller(project=attribution.project, attribution=attribution)

    def _models(self, path: str, dialect: Dialect) -> bytes:
        """Returns all models, or the one that the path names.

        Raises:
            RouteNotFound: if that one is not served.
        """
        table = self._tables.current
        if path == _MODELS:
            return model_list(table.routes, dialect)
        name = path.removeprefix(_MODEL)
        table.route(name)
        return model_document(name, dialect)


async def _within(deadline_s: float | None, reading: Coroutine[Any, Any, bytes]) -> bytes:
    if deadline_s is None:
        return await reading
    async with asyncio.timeout(deadline_s):
        return await reading


def _declared_bytes(scope: Scope) -> int:
    """Returns how large the request's body is said to be; 0 if nothing is said."""
    declared = header(scope, b"content-length")
    return int(declared) if declared.isdigit() else 0


def _is_uploading(scope: Scope) -> bool:
    """Tells whether much of the request's body may still come, which nobody asked its sender to hold back."""
    if _BODY_READ in scope or header(scope, b"expect"):
        return False
    return _declared_bytes(scope) > _SMALL_BODY_BYTES or bool(header(scope, b"transfer-encoding"))


def _methods_below(path: str) -> tuple[str, ...] | None:
    """Returns the methods of a path that names one model or one response; None if there is nothing there."""
    if path.startswith(_MODEL):
        return _GET
    return kept_responses.methods_of(path) if path.startswith(kept_responses.ROOT) else None


def dialect_of(scope: Scope, path: str) -> Dialect:
    """Returns whose shapes a request expects: its API's, else those of the vendor whose client sent it."""
    api = BY_PATH.get(path)
    if api is not None:
        return api.dialect
    return Dialect.ANTHROPIC if header(scope, b"anthropic-version") else Dialect.OPENAI


def _head(scope: Scope) -> CallHead:
    pass_on = to_backend(scope["headers"])
    resent = header(scope, _RESEND_HEADER)
    return CallHead(
        trace_parent=pass_on.get("traceparent", ""),
        agent_name=header(scope, _AGENT_HEADER).decode("latin-1")[:MAX_AGENT_NAME],
        resend_count=int(resent) if resent.isdigit() and len(resent) < 4 else 0,
        pass_on=pass_on,
    )


async def _refuse(scope: Scope, send: Send, error: FulmenError | Refused, unread: Receive | None = None) -> None:
    """Answers with an error before any byte of an answer; `unread` gives what is left of the request."""
    told = call_error(error)
    document = error_document(told, dialect_of(scope, standard_path(without_attempt(scope["path"]))))
    extra = headers_of(error)
    # Of a body that nobody asked for yet its sender may leave out all, and what it sends next would be taken for it.
    if told.status not in BODY_UNREAD and (unread is not None or header(scope, b"expect")):
        extra.append((b"connection", b"close"))
    await respond(send, told.status, document, extra=extra, unread=unread)
