"""Calls model backends over HTTP, one try at a time; retries are decided in `calls.sender`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
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
from fulmen_llm_proxy.backends.call_plan import CallPlan
from fulmen_llm_proxy.backends.headers import Header, of_dialect, to_caller
from fulmen_llm_proxy.backends.litellm.gateway import GatewayDown
from fulmen_llm_proxy.backends.litellm.gateways import URL as GATEWAY_URL
from fulmen_llm_proxy.backends.litellm.gateways import LitellmGateways
from fulmen_llm_proxy.backends.prompt_post import PromptPost
from fulmen_llm_proxy.routing.backend_state import BackendState
from fulmen_llm_proxy.routing.table import Backend, Choice

KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which uvicorn, and thus vLLM, closes an idle connection."""

SILENCE_LIMIT_S = 20
"""Seconds without a sign of a backend's machine after which a connection to it is broken. A busy backend's machine gives signs."""

_ANTHROPIC_VERSION = "2023-06-01"
_ANSWERED = 200
_NO_FAILURE = (408, 429)
"""Statuses of requests that a backend did not serve although it works."""
_SERVER_ERROR = 500


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a call.

    Attributes:
        plan: the request body, and the reader of the answer.
    """

    choice: Choice
    plan: CallPlan
    headers: Mapping[str, str]

    @property
    def backend(self) -> Backend:
        """The backend that is called."""
        return self.choice.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class TryFailed:
    """A try without an answer.

    Attributes:
        kind: short name of the failure, for metrics and `BackendHealth.last_failure_kind`.
        error: the error to report if no further try follows.
        dispatch: the try; None if it was never sent.
        at_once: whether the backend never received it, so that another replica may be tried immediately.
        again: whether the same backend may succeed later.
    """

    kind: str
    error: FulmenError
    dispatch: Dispatch | None = None
    at_once: bool = False
    again: bool = True


@dataclass(slots=True, kw_only=True)
class BackendAnswer:
    """The answer of a backend: complete in `body`, or `body` is the first piece of a stream.

    `headers` holds only those that callers may see. `close` must be called; before the end of a stream it aborts the
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
        """Whether more than `body` may follow."""
        return self._response is not None

    async def piece(self) -> bytes:
        """Returns the next piece after `body`; empty at the end.

        Raises:
            BackendUnavailable: if the stream breaks off or times out.
        """
        if self._response is None:
            return b""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            if self._state is not None:
                stalled = isinstance(error, TimeoutError)
                self._state.failed(self._period, "stream_stalled" if stalled else "stream_broken")
            raise unavailable(self.dispatch.backend.id, "interrupted its answer", error) from error

    def close(self) -> None:
        """Returns the connection to the pool, or closes it if the answer is not complete."""
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
    """Sends calls to backends and counts their outcomes."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        keys: BackendKeys,
        gateways: LitellmGateways,
        silence_s: float,
        max_answer_bytes: int,
    ) -> None:
        """Sets the connection pool.

        Args:
            keys: the proxy's own keys for backends.
            gateways: the processes of vendors that are called through LiteLLM.
            silence_s: read timeout between two pieces of a stream, seconds.
            max_answer_bytes: largest complete answer, bytes.
        """
        self._posts = PromptPost(session)
        self._keys = keys
        self._gateways = gateways
        self._silence_s = silence_s
        self._max_answer_bytes = max_answer_bytes

    async def ask(self, dispatch: Dispatch, state: BackendState) -> BackendAnswer | TryFailed:
        """Returns the answer once it is complete, or once its first piece has arrived; takes over a slot of `state`.

        Raises:
            BackendUnavailable: if the answer is too large, or the backend's key is not configured; retries would not help.
        """
        period = state.begin()
        try:
            answer = await self._post(dispatch, state, period)
        except (aiohttp.ClientError, TimeoutError) as error:
            state.release()
            return _failed(dispatch, state, period, error)
        except GatewayDown as down:
            state.release()
            state.failed(period, down.kind)
            error_of = unavailable(dispatch.backend.id, down.text)
            return TryFailed(kind=down.kind, error=error_of, dispatch=dispatch, at_once=True)
        except BaseException:
            state.release()
            state.breaker.abandoned(period)
            raise
        if answer.status >= _SERVER_ERROR:
            state.failed(period, f"http_{answer.status}")
        elif answer.status in _NO_FAILURE:
            state.breaker.abandoned(period)
        else:
            state.answered(period)
        return answer

    async def _post(self, dispatch: Dispatch, state: BackendState, period: int) -> BackendAnswer:
        backend, plan = dispatch.backend, dispatch.plan
        response = await (self._send if not backend.provider else self._send_through_litellm)(dispatch)
        try:
            content_type, encoded = content_type_of(response), is_encoded(response)
            if response.status != _ANSWERED or encoded:
                require_answer(response, backend.id, encoded=encoded)
            stream = plan.stream and response.status == _ANSWERED and content_type.startswith("text/event-stream")
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

    async def _send(self, dispatch: Dispatch) -> aiohttp.ClientResponse:
        url = address(dispatch.backend, dispatch.plan.api.path, model=dispatch.choice.target.model)
        return await self._posts.post(url, dispatch.plan.body, self._headers(dispatch))

    async def _send_through_litellm(self, dispatch: Dispatch) -> aiohttp.ClientResponse:
        key = self._keys.key(dispatch.backend)
        session, gateway = await self._gateways.session(dispatch.backend)
        return await session.post(
            GATEWAY_URL + dispatch.plan.api.path,
            data=dispatch.plan.body,
            headers=gateway.headers(dispatch.backend, key),
            allow_redirects=False,
        )

    def _limit_silence(self, response: aiohttp.ClientResponse) -> None:
        """Replaces the first-byte timeout with the read timeout of streams."""
        connection = response.connection
        if connection is None or connection.protocol is None:
            return  # the answer is complete
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
    """aiohttp's protocol with one read timer, where the original sets a new one for every piece.

    A stream has a piece per token, and setting timers would cost as much as reading it. The timeout is the same: a
    timer that fires after data has arrived waits for the rest of the interval.
    """

    _read_at = 0.0
    _timed_s: float | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, *, silence_limit_s: int = SILENCE_LIMIT_S) -> None:
        """Sets the time after which a silent machine counts as lost, seconds."""
        super().__init__(loop=loop)
        self._silence_limit_s = silence_limit_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Has the kernel end the connection if the backend's machine is silent, while it is open."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        # Unanswered data and unanswered probes; names that a platform lacks are left out.
        for level, name, value in (
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", self._silence_limit_s // 2),
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", self._silence_limit_s // 4),
            (socket.IPPROTO_TCP, "TCP_KEEPCNT", 2),
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 1000 * self._silence_limit_s),
        ):
            if connection is not None and (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(level, option, value)

    def start_timeout(self) -> None:
        """Restarts the timer."""
        self._drop_timeout()
        self._reschedule_timeout()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resumes reading if it was paused; the original does needless work after every piece."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _reschedule_timeout(self) -> None:
        if self._read_timeout_handle is not None and self._timed_s == self._read_timeout:
            self._read_at = self._loop.time()
            return
        self._timed_s = self._read_timeout
        super()._reschedule_timeout()

    def _on_read_timeout(self) -> None:
        left_s = self._read_at + (self._timed_s or 0.0) - self._loop.time()
        if left_s > 0:
            self._read_timeout_handle = self._loop.call_later(left_s, self._on_read_timeout)
        else:
            super()._on_read_timeout()


class _CleanConnector(aiohttp.TCPConnector):
    """Discards connections that received data after their last answer, which would be read as the next one."""

    def __init__(self, silence_limit_s: int) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        handler: Callable[..., ResponseHandler] = PatientHandler
        self._factory = partial(handler, loop=self._loop, silence_limit_s=silence_limit_s)

    async def _get(self, *args: Any) -> Connection | None:  # Any: the library's own arguments, passed through
        while (connection := await super()._get(*args)) is not None:
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()
        return None


def open_session(
    *, connect_timeout_s: float, first_byte_timeout_s: float, silence_limit_s: int = SILENCE_LIMIT_S
) -> aiohttp.ClientSession:
    """Opens the connection pool; to be called in the event loop that will use it.

    Args:
        connect_timeout_s: connect timeout, seconds.
        first_byte_timeout_s: read timeout before the first byte of an answer, and within a complete one, seconds.
        silence_limit_s: see `SILENCE_LIMIT_S`; at least 4.
    """
    return aiohttp.ClientSession(
        connector=_CleanConnector(silence_limit_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=first_byte_timeout_s),
        headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
        skip_auto_headers=("User-Agent",),
        auto_decompress=False,
    )


def _failed(
    dispatch: Dispatch, state: BackendState, period: int, error: aiohttp.ClientError | TimeoutError
) -> TryFailed:
    """Classifies an error, and counts it if the backend caused it."""
    backend_id = dispatch.backend.id
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        state.failed(period, "connect")
        reason = unavailable(backend_id, "cannot be reached", error)
        return TryFailed(kind="connect", error=reason, dispatch=dispatch, at_once=True)
    if isinstance(error, TimeoutError):
        # A slow complete answer is not a failure of the backend; a stream that does not start is one.
        if dispatch.plan.stream:
            state.failed(period, "timeout")
        else:
            state.breaker.abandoned(period)
        late = DeadlineExceeded(f"The backend '{backend_id}' did not answer in time.", backend=f"backends/{backend_id}")
        return TryFailed(kind="timeout", error=late, dispatch=dispatch, again=False)
    state.failed(period, "broken")
    return TryFailed(kind="broken", error=unavailable(backend_id, "broke off", error), dispatch=dispatch)
