"""`/v1/responses/{id}`: stored responses, fetched from the backend that stores them, or from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import parse_qsl

from fulmen_llm_proxy.apis.api import ApiName, encode
from fulmen_llm_proxy.apis.sealed_responses import sealed_answer
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.attempts.guard import AttemptGuard
from fulmen_llm_proxy.backends.stored_responses import StoredResponsesClient
from fulmen_llm_proxy.calls.failures import SOURCE_HEADER, Refused
from fulmen_llm_proxy.calls.responses.input_list import input_list
from fulmen_llm_proxy.calls.responses.response_ids import ResponseIds
from fulmen_llm_proxy.calls.responses.response_store import ResponseStore, id_for_callers, id_in_store
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_service_kit.http.wire import JSON_TYPE, Scope, Send, respond

ROOT = "/v1/responses/"

_METHODS = {"": ("GET", "DELETE"), "cancel": ("POST",), "input_items": ("GET",)}
"""Methods by the path after the id."""


def methods_of(path: str) -> tuple[str, ...] | None:
    """Returns the methods of a path of a stored response; None if there is no such path."""
    return _METHODS.get(path.removeprefix(ROOT).partition("/")[2])


class StoredResponses:
    """Answers requests for stored responses."""

    def __init__(
        self,
        *,
        ids: ResponseIds,
        client: StoredResponsesClient,
        kept: ResponseStore,
        tables: TableHolder,
        guard: AttemptGuard,
    ) -> None:
        self._ids = ids
        self._client = client
        self._kept = kept
        self._tables = tables
        self._guard = guard

    async def answer(self, scope: Scope, path: str, caller: Caller, send: Send) -> None:
        """Answers one request.

        Raises:
            AttemptOver: if the caller's attempt has ended.
            Refused: if the caller has no such response, or a stream is requested.
            ArgumentInvalid: if a parameter is invalid.
            BackendUnavailable: if its backend cannot be reached.
            FulmenError: if the store does not answer.
        """
        if caller.attribution is not None:
            self._guard.require(caller.attribution)
        project = caller.project
        sealed_id, _, action = path.removeprefix(ROOT).partition("/")
        query = tuple(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        if kept_id := id_in_store(sealed_id):
            _refuse_stream(query)
            body = await self._answer_kept(scope["method"], kept_id, action, dict(query), caller)
            await respond(send, 200, body, JSON_TYPE)
            return
        stored = self._ids.opened(sealed_id, project=project)
        backend = None if stored is None else self._tables.current.backends.get(stored.backend_id)
        if stored is None or backend is None or ApiName.RESPONSES not in backend.apis:
            raise _not_found(sealed_id)
        _refuse_stream(query)
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

    async def _answer_kept(
        self, method: str, kept_id: str, action: str, query: Mapping[str, str], caller: Caller
    ) -> bytes:
        """Returns the answer to a request for a response that the proxy keeps, as JSON."""
        given = id_for_callers(kept_id)
        if method == "DELETE":
            if not await self._kept.delete(caller, kept_id):
                raise _not_found(given)
            return encode({"id": given, "object": "response", "deleted": True})
        found = await self._kept.page(caller, kept_id)
        if not found:
            raise _not_found(given)
        if action == "cancel":
            raise Refused(400, "response_not_cancellable", "Only a response in the background can be cancelled.")
        if action == "input_items":
            earlier, _ = await self._kept.earlier(caller, found[0])
            return input_list(found[0], earlier, query)
        return found[0].response


def _not_found(given: str) -> Refused:
    return Refused(404, "response_not_found", f"Response '{given[:200]}' not found.")


def _refuse_stream(query: Sequence[tuple[str, str]]) -> None:
    if ("stream", "true") in query:
        raise Refused(400, "stream_not_served", "A stored response cannot be streamed.")
