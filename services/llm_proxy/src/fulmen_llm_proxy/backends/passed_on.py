"""Passes requests on to a backend unread: files, audio, images and whatever else the proxy has no API for."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from fulmen.errors import DeadlineExceeded
from fulmen_llm_proxy.backends.access import BackendKeys, address, content_type_of, is_encoded, read_whole, unavailable
from fulmen_llm_proxy.backends.headers import Header, of_dialect, to_caller
from fulmen_llm_proxy.routing.table import Backend

_ANSWERS = range(200, 300)
_ERRORS = range(400, 600)
_KEY_REFUSED = (401, 403)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedRequest:
    """A request as it is sent.

    Attributes:
        path: path below the backend's base URL, escaped, such as `/files/file-1`.
        query: names and values, unescaped.
        headers: the caller's headers that backends may see, with the type of the body.
    """

    method: str
    path: str
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedAnswer:
    """The answer: whole in `body`, or a stream of events that begins with it."""

    status: int
    content_type: bytes
    headers: Sequence[Header]
    body: bytes
    is_stream: bool
    pieces: AsyncIterator[bytes]


class PassedOnClient:
    """Sends requests as they are, with the proxy's own key, once: nothing is known of what a second try would do."""

    def __init__(
        self, *, session: aiohttp.ClientSession, keys: BackendKeys, max_answer_bytes: int, deadline_s: float
    ) -> None:
        """Sets the connection pool.

        Args:
            max_answer_bytes: largest answer, bytes; for a stream, all of it together.
            deadline_s: timeout of a whole answer, and of the first event of a stream, seconds.
        """
        self._session = session
        self._keys = keys
        self._max_answer_bytes = max_answer_bytes
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def ask(self, backend: Backend, request: PassedRequest) -> AsyncIterator[PassedAnswer]:
        """Yields the answer; a stream is read within the block.

        Raises:
            BackendUnavailable: if the backend cannot be reached, redirects, refuses the proxy's key, or answers too much.
            DeadlineExceeded: if it does not answer in time.
        """
        response: aiohttp.ClientResponse | None = None
        try:
            try:
                async with asyncio.timeout(self._deadline_s):
                    response = await self._session.request(
                        request.method,
                        address(backend, request.path, query=request.query),
                        data=io.BytesIO(request.body) if request.body else None,  # a large one in pieces
                        headers={**of_dialect(request.headers, backend.dialect), **self._keys.headers(backend)},
                        allow_redirects=False,
                    )
                    answer = await self._answer(response, backend)
            except TimeoutError:
                text = f"The backend '{backend.id}' did not answer in time."
                raise DeadlineExceeded(text, backend=f"backends/{backend.id}") from None
            except aiohttp.ClientError as error:
                raise unavailable(backend.id, "cannot be reached", error) from error
            yield answer
        finally:
            if response is not None:
                response.release() if response.content.at_eof() else response.close()

    async def _answer(self, response: aiohttp.ClientResponse, backend: Backend) -> PassedAnswer:
        if response.status in _KEY_REFUSED:
            raise unavailable(backend.id, "refused the proxy's own key")
        if response.status not in _ANSWERS and response.status not in _ERRORS:
            raise unavailable(backend.id, f"answered with unexpected status {response.status}")
        if is_encoded(response):
            raise unavailable(backend.id, "sent a compressed answer although `identity` was requested")
        content_type = content_type_of(response)
        is_stream = response.status in _ANSWERS and content_type.startswith("text/event-stream")
        if is_stream:
            body = await response.content.readany()
        else:
            body = await read_whole(response, backend.id, self._max_answer_bytes)
        return PassedAnswer(
            status=response.status,
            content_type=content_type.encode("latin-1"),
            headers=to_caller(response.raw_headers),
            body=body,
            is_stream=is_stream,
            pieces=self._pieces(response, backend, left_bytes=self._max_answer_bytes - len(body)),
        )

    async def _pieces(
        self, response: aiohttp.ClientResponse, backend: Backend, *, left_bytes: int
    ) -> AsyncIterator[bytes]:
        """Yields what follows the first piece of a stream.

        Raises:
            BackendUnavailable: if the stream breaks off or times out, or is too large.
        """
        try:
            while piece := await response.content.readany():
                left_bytes -= len(piece)
                if left_bytes < 0:
                    raise unavailable(backend.id, f"answered with more than {self._max_answer_bytes} bytes")
                yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unavailable(backend.id, "interrupted its answer", error) from error
