"""`/v1/responses/{id}`: stored responses, fetched from the backend that stores them."""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qsl

from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.apis.sealed_responses import sealed_answer
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.attempts.guard import AttemptGuard
from fulmen_llm_proxy.backends.stored_responses import StoredResponsesClient
from fulmen_llm_proxy.calls.failures import SOURCE_HEADER, Refused
from fulmen_llm_proxy.calls.response_ids import ResponseIds
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_service_kit.http.wire import Scope, Send, respond

ROOT = "/v1/responses/"

_METHODS = {"": ("GET", "DELETE"), "cancel": ("POST",), "input_items": ("GET",)}
"""Methods by the path after the id."""


def methods_of(path: str) -> tuple[str, ...] | None:
    """Returns the methods of a path of a stored response; None if there is no such path."""
    return _METHODS.get(path.removeprefix(ROOT).partition("/")[2])


class StoredResponses:
    """Answers requests for stored responses."""

    def __init__(
        self, *, ids: ResponseIds, client: StoredResponsesClient, tables: TableHolder, guard: AttemptGuard
    ) -> None:
        self._ids = ids
        self._client = client
        self._tables = tables
        self._guard = guard

    async def answer(self, scope: Scope, path: str, caller: Caller, send: Send) -> None:
        """Answers one request.

        Raises:
            AttemptOver: if the caller's attempt has ended.
            Refused: if the project has no such response, or a stream is requested.
            BackendUnavailable: if its backend cannot be reached.
        """
        if caller.attribution is not None:
            self._guard.require(caller.attribution)
        project = caller.project
        sealed_id, _, action = path.removeprefix(ROOT).partition("/")
        stored = self._ids.opened(sealed_id, project=project)
        backend = None if stored is None else self._tables.current.backends.get(stored.backend_id)
        if stored is None or backend is None or ApiName.RESPONSES not in backend.apis:
            raise Refused(404, "response_not_found", f"Response '{sealed_id[:200]}' not found.")
        query = tuple(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        if ("stream", "true") in query:
            raise Refused(400, "stream_not_served", "A stored response cannot be streamed.")
        found = await self._client.ask(
            backend,
            method=scope["method"],
            raw_id=stored.raw_id,
            action=action,
            query=tuple(pair for pair in query if pair[0] != "api-version"),
        )
        body = found.body
        if found.status == 200 and action != "input_items":
            body = sealed_answer(body, partial(self._ids.sealed, backend_id=backend.id, project=project))
        extra = [*found.headers, *([(SOURCE_HEADER, b"backend")] if found.status != 200 else [])]
        await respond(send, found.status, body, found.content_type, extra)
