"""Fetches stored responses from the backends that store them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp

from fulmen.errors import DeadlineExceeded
from fulmen_llm_proxy.backends.access import (
    BackendKeys,
    address,
    content_type_of,
    is_encoded,
    read_whole,
    require_answer,
    unavailable,
)
from fulmen_llm_proxy.backends.headers import Header, to_caller
from fulmen_llm_proxy.routing.table import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponseAnswer:
    """The answer of the backend that stores a response."""

    status: int
    body: bytes
    content_type: bytes
    headers: Sequence[Header]


class StoredResponsesClient:
    """Reads, deletes and cancels responses at the backends that store them, without retries."""

    def __init__(
        self, *, session: aiohttp.ClientSession, keys: BackendKeys, max_answer_bytes: int, deadline_s: float
    ) -> None:
        """Sets the connection pool.

        Args:
            max_answer_bytes: largest answer, bytes.
            deadline_s: timeout of a request, seconds.
        """
        self._session = session
        self._keys = keys
        self._max_answer_bytes = max_answer_bytes
        self._deadline_s = deadline_s

    async def ask(
        self, backend: Backend, *, method: str, raw_id: str, action: str = "", query: Sequence[tuple[str, str]] = ()
    ) -> StoredResponseAnswer:
        """Returns the backend's answer.

        Args:
            raw_id: the backend's own id of the response.
            action: subresource, such as `cancel`; empty for the response itself.

        Raises:
            BackendUnavailable: if it cannot be reached, or its answer is malformed or too large.
            DeadlineExceeded: if it does not answer in time.
        """
        path = f"/responses/{quote(raw_id, safe='')}" + (f"/{action}" if action else "")
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                self._session.request(
                    method,
                    address(backend, path, query=query),
                    headers=self._keys.headers(backend),
                    allow_redirects=False,
                ) as response,
            ):
                encoded = is_encoded(response)
                require_answer(response, backend.id, encoded=encoded)
                body = await read_whole(response, backend.id, self._max_answer_bytes)
        except TimeoutError:
            raise DeadlineExceeded(
                f"The backend '{backend.id}' did not answer in time.", backend=f"backends/{backend.id}"
            ) from None
        except aiohttp.ClientError as error:
            raise unavailable(backend.id, "cannot be reached", error) from error
        return StoredResponseAnswer(
            status=response.status,
            body=b"" if encoded else body,
            content_type=content_type_of(response).encode(),
            headers=to_caller(response.raw_headers),
        )
