"""The ASGI application: which path is answered by whom, and what every other path is told."""

from __future__ import annotations

import uuid

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from fulmen.errors import Draining, FulmenError, InternalError, MessageTooLarge
from fulmen_llm_proxy.domain.table import TableHolder
from fulmen_llm_proxy.transport.http.auth import HttpAuthenticator, attribution_of
from fulmen_llm_proxy.transport.http.chat import ChatCompletions
from fulmen_llm_proxy.transport.http.failures import Refused, respond_error
from fulmen_service_kit.http_wire import CallerGone, Message, Receive, Scope, Send, respond

SERVED = "POST /v1/chat/completions, GET /v1/models, GET /healthz, GET /metrics"

_NOT_YET_SERVED = frozenset(
    {
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
)
_METHODS = {
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/healthz": "GET",
    "/metrics": "GET",
}
_TEXT = b"text/plain; charset=utf-8"

_log = structlog.get_logger(__name__)


class Door:
    """Answers HTTP; the only place that turns an unexpected exception into an answer."""

    def __init__(
        self,
        *,
        authenticator: HttpAuthenticator,
        chat: ChatCompletions,
        tables: TableHolder,
        registry: CollectorRegistry,
    ) -> None:
        self._authenticator = authenticator
        self._chat = chat
        self._tables = tables
        self._registry = registry
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            return
        started = False

        async def tell(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._dispatch(scope, receive, tell)
        except CallerGone:
            return
        except MessageTooLarge as error:
            await respond_error(send, error, unread=receive)
        except (FulmenError, Refused) as error:
            await respond_error(send, error)
        except Exception as error:  # noqa: BLE001 - the edge: no text of an unknown error leaves the process
            error_id = uuid.uuid4().hex[:12]
            _log.error("call_failed_unexpectedly", path=scope["path"], error_id=error_id, exc_info=error)
            if not started:
                await respond_error(send, InternalError(f"Internal error. Quote id {error_id}.", error_id=error_id))
            else:
                await send({"type": "http.response.body", "body": b""})

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        expected = _METHODS.get(path)
        if expected is None:
            raise _unknown(path)
        if scope["method"] != expected:
            raise Refused(405, "method_not_allowed", f"{path} answers {expected} only.")
        match path:
            case "/v1/chat/completions":
                if self.draining:
                    raise Draining("The proxy is shutting down; try again.")
                caller = self._authenticator.authenticate(scope)
                await self._chat(attribution_of(caller), scope, receive, send)
            case "/v1/models":
                self._authenticator.authenticate(scope)
                await respond(send, 200, self._models())
            case "/healthz":
                await respond(send, 503 if self.draining else 200, b"draining" if self.draining else b"ok", _TEXT)
            case _:
                await respond(send, 200, generate_latest(self._registry), CONTENT_TYPE_LATEST.encode())

    def _models(self) -> bytes:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "fulmen"}
            for name in sorted(self._tables.current.routes)
        ]
        return msgspec.json.encode({"object": "list", "data": models})


def _unknown(path: str) -> Refused:
    if path in _NOT_YET_SERVED:
        return Refused(501, "not_yet_served", f"{path} is not yet served. Served: {SERVED}.")
    return Refused(404, "path_not_found", f"There is nothing at {path[:200]}. Served: {SERVED}.")
