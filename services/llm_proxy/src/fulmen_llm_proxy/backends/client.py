"""Calls model backends over HTTP: one try at a time. What a failed try is followed by, `calls.sender` decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection

from fulmen.errors import DeadlineExceeded, FulmenError
from fulmen_llm_proxy.apis.api import Dialect
from fulmen_llm_proxy.backends.access import (
    BackendKeys,
    address,
    content_type_of,
    is_encoded,
    read_whole,
    require_answer,
    unavailable,
)
from fulmen_llm_proxy.backends.call_plan import Exchange
from fulmen_llm_proxy.backends.headers import Header, of_dialect, to_caller
from fulmen_llm_proxy.routing.backend_state import BackendState
from fulmen_llm_proxy.routing.table import Backend, Choice

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn, and with it vLLM, closes an idle connection."""

_ANTHROPIC_VERSION = "2023-06-01"
_ANSWERED = 200
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a call: where it goes, and with what.

    Attributes:
        exchange: the body, and how the answer will be read.
    """

    choice: Choice
    exchange: Exchange
    headers: Mapping[str, str]

    @property
    def backend(self) -> Backend:
        """Where it goes."""
        return self.choice.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class TryFailed:
    """A try that brought no answer.

    Attributes:
        kind: in a word, for figures and `BackendHealth.last_failure_kind`.
        error: what the caller is told if this is the end of it.
        dispatch: where it went; None if it went nowhere.
        at_once: the backend never saw it.
        again: the same backend may do better later.
    """

    kind: str
    error: FulmenError
    dispatch: Dispatch | None = None
    at_once: bool = False
    again: bool = True


@dataclass(slots=True, kw_only=True)
class BackendAnswer:
    """The answer of a backend: whole in `body`, or `body` is its first piece and more follows.

    `headers` are those that the caller may see. `close` must be called; before the end of a stream it aborts the
    backend's work.
    """

    dispatch: Dispatch
    status: int
    content_type: bytes
    retry_after: str
    headers: Sequence[Header]
    body: bytes
    _response: aiohttp.ClientResponse | None = None
    _state: BackendState | None = None
    _period: int = 0

    @property
    def is_stream(self) -> bool:
        """True if more than `body` may come."""
        return self._response is not None

    async def piece(self) -> bytes:
        """Returns what comes next after `body`; nothing at the end.

        Raises:
            BackendUnavailable: if the stream breaks off or stays silent for too long.
        """
        if self._response is None:
            return b""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            if self._state is not None:
                stalled = isinstance(error, TimeoutError)
                self._state.failed(self._period, "stream_stalled" if stalled else "stream_broken")
            raise unavailable(self.dispatch.backend.id, "broke off its answer", error) from error

    def close(self) -> None:
        """Ends the exchange: gives the connection back, or cuts it if the answer is not over."""
        response, self._response = self._response, None
        if response is not None:
            if response.content.at_eof():
                response.release()
            else:
                response.close()
        state, self._state = self._state, None
        if state is not None:
            state.release()


class BackendClient:
    """Sends calls to backends and counts what becomes of them."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        keys: BackendKeys,
        silence_s: float,
        max_answer_bytes: int,
    ) -> None:
        """Takes the connections' pool.

        Args:
            keys: what backends are shown.
            silence_s: longest wait between two pieces of a stream.
            max_answer_bytes: largest whole answer.
        """
        self._session = session
        self._keys = keys
        self._silence_s = silence_s
        self._max_answer_bytes = max_answer_bytes

    async def ask(self, dispatch: Dispatch, state: BackendState) -> BackendAnswer | TryFailed:
        """Returns the answer as soon as it is whole, or its first piece is there; takes over a slot of `state`.

        Raises:
            BackendUnavailable: if the answer is too large, or the proxy lacks the backend's key: no other try helps.
        """
        period = state.begin()
        try:
            answer = await self._exchange(dispatch, state, period)
        except (aiohttp.ClientError, TimeoutError) as error:
            state.release()
            return _failed(dispatch, state, period, error)
        except BaseException:
            state.release()
            state.breaker.abandoned(period)
            raise
        if answer.status >= _SERVER_ERROR:
            state.failed(period, f"http_{answer.status}")
        elif answer.status == _TOO_MANY_REQUESTS:
            state.breaker.abandoned(period)
        else:
            state.answered(period)
        return answer

    async def _exchange(self, dispatch: Dispatch, state: BackendState, period: int) -> BackendAnswer:
        backend, exchange = dispatch.backend, dispatch.exchange
        response = await self._session.post(
            address(backend, exchange.api.path, model=dispatch.choice.target.model),
            data=exchange.body,
            headers=self._headers(dispatch),
            allow_redirects=False,
        )
        try:
            content_type, encoded = content_type_of(response), is_encoded(response)
            if response.status != _ANSWERED or encoded:
                require_answer(response, backend.id, encoded=encoded)
            stream = exchange.stream and response.status == _ANSWERED and content_type.startswith("text/event-stream")
            if stream:
                body = await response.content.readany()
                if not body:
                    raise aiohttp.ClientPayloadError("The stream ended before its first byte.")
                self._limit_silence(response)
            else:
                body = await read_whole(response, backend.id, self._max_answer_bytes)
        except BaseException:
            response.close()
            raise
        ended = not stream or response.content.at_eof()
        answer = BackendAnswer(
            dispatch=dispatch,
            status=response.status,
            content_type=content_type.encode("latin-1"),
            retry_after=response.headers.get("Retry-After", ""),
            headers=to_caller(response.raw_headers),
            body=b"" if encoded else body,
            _response=response,
            _state=state,
            _period=period,
        )
        if ended:
            answer.close()
        return answer

    def _limit_silence(self, response: aiohttp.ClientResponse) -> None:
        """Puts the limit between two pieces in place of that before the first one."""
        connection = response.connection
        if connection is None or connection.protocol is None:
            return  # the answer is over
        if connection.protocol.read_timeout != self._silence_s:
            connection.protocol.read_timeout = self._silence_s
            connection.protocol.start_timeout()

    def _headers(self, dispatch: Dispatch) -> dict[str, str]:
        backend = dispatch.backend
        headers = of_dialect(dispatch.headers, backend.dialect)
        if backend.dialect is Dialect.ANTHROPIC:
            headers.setdefault("anthropic-version", backend.api_version or _ANTHROPIC_VERSION)
        headers |= self._keys.headers(backend)
        return headers


class PatientHandler(ResponseHandler):
    """aiohttp's side of a connection, with one timer for a silence where its own sets a new one for every piece.

    A stream has a piece for each token, and its timers cost as much as reading it. The bound is the same: a timer
    that goes off after something came waits for what is left of the silence.
    """

    _heard_at = 0.0
    _timed_s: float | None = None

    def start_timeout(self) -> None:
        """Begins to wait anew."""
        self._drop_timeout()
        self._reschedule_timeout()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Goes on reading where that was paused; asked after every piece, it would parse nothing, and ask the socket."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _reschedule_timeout(self) -> None:
        if self._read_timeout_handle is not None and self._timed_s == self._read_timeout:
            self._heard_at = self._loop.time()
            return
        self._timed_s = self._read_timeout
        super()._reschedule_timeout()

    def _on_read_timeout(self) -> None:
        left_s = self._heard_at + (self._timed_s or 0.0) - self._loop.time()
        if left_s > 0:
            self._read_timeout_handle = self._loop.call_later(left_s, self._on_read_timeout)
        else:
            super()._on_read_timeout()


class _CleanConnector(aiohttp.TCPConnector):
    """Hands out no connection on which something came after its last answer: it would be taken for the next one."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        handler: type[ResponseHandler] = PatientHandler
        self._factory = partial(handler, loop=self._loop)

    async def _get(self, *args: Any) -> Connection | None:  # Any: the library's own, handed on as they come
        while (connection := await super()._get(*args)) is not None:
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()
        return None


def open_session(*, connect_timeout_s: float, first_byte_timeout_s: float) -> aiohttp.ClientSession:
    """Opens the connections' pool; to be called in the event loop that will use it.

    Args:
        connect_timeout_s: most seconds for a new connection.
        first_byte_timeout_s: most seconds of silence before the first byte of an answer, and within a whole one.
    """
    return aiohttp.ClientSession(
        connector=_CleanConnector(),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=first_byte_timeout_s),
        headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
        skip_auto_headers=("User-Agent",),
        auto_decompress=False,
    )


def _failed(
    dispatch: Dispatch, state: BackendState, period: int, error: aiohttp.ClientError | TimeoutError
) -> TryFailed:
    """Says what kind of failure an error is, and counts it if it is the backend's."""
    backend_id = dispatch.backend.id
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        state.failed(period, "connect")
        reason = unavailable(backend_id, "cannot be reached", error)
        return TryFailed(kind="connect", error=reason, dispatch=dispatch, at_once=True)
    if isinstance(error, TimeoutError):
        # A whole answer that takes its time is no failure of the backend; a stream that does not begin is.
        if dispatch.exchange.stream:
            state.failed(period, "timeout")
        else:
            state.breaker.abandoned(period)
        late = DeadlineExceeded(f"The backend '{backend_id}' did not answer in time.", backend=f"backends/{backend_id}")
        return TryFailed(kind="timeout", error=late, dispatch=dispatch, again=False)
    state.failed(period, "broken")
    return TryFailed(kind="broken", error=unavailable(backend_id, "broke off", error), dispatch=dispatch)
