"""`/v1/responses/{id}`: responses that a backend keeps, asked of the one that keeps them."""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qsl

from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.apis.sealed_responses import sealed_answer
from fulmen_llm_proxy.backends.kept_responses import KeptResponsesClient
from fulmen_llm_proxy.calls.failures import SOURCE_HEADER, Refused
from fulmen_llm_proxy.calls.response_ids import ResponseIds
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_service_kit.http_wire import Scope, Send, respond

ROOT = "/v1/responses/"

_METHODS = {"": ("GET", "DELETE"), "cancel": ("POST",), "input_items": ("GET",)}
"""By what follows the id."""


def methods_of(path: str) -> tuple[str, ...] | None:
    """Returns the methods of a path below a response; None if there is nothing there."""
    return _METHODS.get(path.removeprefix(ROOT).partition("/")[2])


class KeptResponses:
    """Answers for responses that backends keep."""

    def __init__(self, *, ids: ResponseIds, client: KeptResponsesClient, tables: TableHolder) -> None:
        self._ids = ids
        self._client = client
        self._tables = tables

    async def answer(self, scope: Scope, path: str, project: str, send: Send) -> None:
        """Answers one request.

        Raises:
            Refused: if there is no such response for this project, or it is asked for as a stream.
            BackendUnavailable: if its backend is away.
        """
        sealed_id, _, action = path.removeprefix(ROOT).partition("/")
        kept = self._ids.opened(sealed_id, project=project)
        backend = None if kept is None else self._tables.current.backends.get(kept.backend_id)
        if kept is None or backend is None or ApiName.RESPONSES not in backend.apis:
            raise Refused(404, "response_not_found", f"There is no response '{sealed_id[:200]}' here.")
        query = tuple(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        if ("stream", "true") in query:
            raise Refused(400, "stream_not_served", "A kept response is given whole, not as a stream.")
        found = await self._client.ask(
            backend,
            method=scope["method"],
            raw_id=kept.raw_id,
            action=action,
            query=tuple(pair for pair in query if pair[0] != "api-version"),
        )
        body = found.body
        if found.status == 200 and action != "input_items":
            body = sealed_answer(body, partial(self._ids.sealed, backend_id=backend.id, project=project))
        extra = [*found.headers, *([(SOURCE_HEADER, b"backend")] if found.status != 200 else [])]
        await respond(send, found.status, body, found.content_type, extra)
