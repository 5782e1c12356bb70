"""Calls model backends over HTTP, with retries before the first byte and never after it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.clients.backend_hold import BackendHold
from fulmen_llm_proxy.domain.apis.api import Dialect
from fulmen_llm_proxy.domain.backend_state import BackendState, BackendStates
from fulmen_llm_proxy.domain.headers import Header, of_dialect, to_caller
from fulmen_llm_proxy.domain.retry import RetryPolicy
from fulmen_llm_proxy.domain.routing import Backend

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn, and with it vLLM, closes an idle connection."""

_ANTHROPIC_VERSION = "2023-06-01"
STATUS_OVERLOADED = 503
_JSON = "application/json"
_MAX_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One try of a call: where it goes, and with what.

    Attributes:
        path: the API's, below the backend's base address.
        model: the backend's name of the model.
    """

    backend: Backend
    path: str
    model: str
    body: bytes
    stream: bool
    headers: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class BackendAnswer:
    """The answer of a backend: whole in `body`, or `body` is its first piece and more follows.

    `headers` are those that the caller may see. `close` must be called; before the end of a stream it aborts the
    backend's work.
    """

    status: int
    content_type: bytes
    retry_after: str
    headers: Sequence[Header]
    body: bytes
    _response: aiohttp.ClientResponse | None
    _state: BackendState | None
    _backend_id: str

    @property
    def is_stream(self) -> bool:
        """True if more than `body` may come."""
        return self._response is not None

    async def rest(self) -> AsyncIterator[bytes]:
        """Yields what follows `body`, as it comes.

        Raises:
            BackendUnavailable: if the stream breaks off or stays silent for too long.
        """
        if self._response is None:
            return
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unavailable(self._backend_id, "broke off its answer", error) from error

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
    """Sends calls to backends; keeps their connections and their state."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        states: BackendStates,
        hold: BackendHold,
        keys: Mapping[str, str],
        retry: RetryPolicy,
        max_answer_bytes: int,
    ) -> None:
        self._session = session
        self._states = states
        self._hold = hold
        self._keys = keys
        self._retry = retry
        self._max_answer_bytes = max_answer_bytes

    async def send(self, plan: Callable[[], Dispatch]) -> BackendAnswer:
        """Returns the first answer, trying again while the backend is away or overloaded.

        An answer 503 or a connection that fails before the first byte of the answer's body (of a
        whole answer: before its last) is tried again, with growing waits that respect Retry-After,
        until `retry.deadline_s` after the first failure; then the last outcome stands.

        Args:
            plan: says where the next try goes; asked anew for each, and after each wait, so that a
                try after a swap goes to the new place.

        Raises:
            BackendUnavailable: if the last try got no answer.
        """
        outcome = await self._try(plan)
        if isinstance(outcome, BackendAnswer) and not _again(outcome):
            return outcome
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._retry.deadline_s
        for delay_s in self._retry.delays(random.random):
            wait_s = max(delay_s, _retry_after_s(outcome))
            if loop.time() + wait_s > give_up_at:
                break
            if isinstance(outcome, BackendAnswer):
                outcome.close()
            await asyncio.sleep(wait_s)
            outcome = await self._try(plan)
            if not _again(outcome):
                break
        if isinstance(outcome, BackendUnavailable):
            raise outcome
        return outcome

    async def _admitted(self, plan: Callable[[], Dispatch]) -> Dispatch | BackendUnavailable:
        """Returns a plan for which a slot of its backend is taken."""
        while True:
            dispatch = plan()
            if self._hold.in_force(dispatch.backend):
                dispatch = await self._hold.over(plan)
            backend = dispatch.backend
            state = self._states.of(backend.id)
            try:
                async with asyncio.timeout(max(self._retry.deadline_s, 1.0)):
                    waited = await state.acquire(backend.max_in_flight, max_waiting=1024)
            except TimeoutError:
                return BackendUnavailable(
                    f"The backend '{backend.id}' has no free place.", backend=f"backends/{backend.id}"
                )
            if not waited:
                return dispatch
            try:
                dispatch = plan()
            except BaseException:
                state.release()
                raise
            if dispatch.backend.id == backend.id and not self._hold.in_force(dispatch.backend):
                return dispatch
            state.release()

    async def _try(self, plan: Callable[[], Dispatch]) -> BackendAnswer | BackendUnavailable:
        dispatch = await self._admitted(plan)
        if isinstance(dispatch, BackendUnavailable):
            return dispatch
        backend = dispatch.backend
        state = self._states.of(backend.id)
        period = state.begin()
        try:
            answer = await self._exchange(dispatch, state)
        except (aiohttp.ClientError, TimeoutError) as error:
            state.release()
            state.failed(period, "connect")
            return _unavailable(backend.id, "cannot be reached", error)
        except BaseException:
            state.release()
            raise
        if answer.status == STATUS_OVERLOADED:
            state.failed(period, f"http_{answer.status}")
        else:
            state.answered(period)
        return answer

    async def _exchange(self, dispatch: Dispatch, state: BackendState) -> BackendAnswer:
        backend = dispatch.backend
        response = await self._session.post(
            _address(dispatch), data=dispatch.body, headers=self._headers(dispatch), allow_redirects=False
        )
        try:
            content_type = response.headers.get("Content-Type", _JSON)
            if not content_type.isascii():
                content_type = _JSON
            stream = dispatch.stream and content_type.startswith("text/event-stream")
            if stream:
                body = await response.content.readany()
                if not body:
                    raise aiohttp.ClientPayloadError("The stream ended before its first byte.")
            else:
                body = await self._whole(response, backend.id)
        except BaseException:
            response.close()
            raise
        ended = not stream or response.content.at_eof()
        answer = BackendAnswer(
            status=response.status,
            content_type=content_type.encode("latin-1"),
            retry_after=response.headers.get("Retry-After", ""),
            headers=to_caller(response.raw_headers),
            body=body,
            _response=response,
            _state=state,
            _backend_id=backend.id,
        )
        if ended:
            answer.close()
        return answer

    async def _whole(self, response: aiohttp.ClientResponse, backend_id: str) -> bytes:
        if response.content_length is not None and response.content_length <= self._max_answer_bytes:
            return await response.read()
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self._max_answer_bytes:
                raise BackendUnavailable(
                    f"The answer of the backend '{backend_id}' is over {self._max_answer_bytes} bytes.",
                    backend=f"backends/{backend_id}",
                )
        return bytes(body)

    def _headers(self, dispatch: Dispatch) -> dict[str, str]:
        backend = dispatch.backend
        headers = of_dialect(dispatch.headers, backend.dialect)
        if backend.dialect is Dialect.ANTHROPIC:
            headers.setdefault("anthropic-version", backend.api_version or _ANTHROPIC_VERSION)
        if backend.key_name:
            key = self._key(backend)
            if backend.dialect is Dialect.ANTHROPIC:
                headers["x-api-key"] = key
            elif backend.azure:
                headers["api-key"] = key
            else:
                headers["Authorization"] = f"Bearer {key}"
        return headers

    def _key(self, backend: Backend) -> str:
        key = self._keys.get(backend.key_name)
        if key is None:
            raise BackendUnavailable(
                f"The proxy has no key '{backend.key_name}' for the backend '{backend.id}'.",
                backend=f"backends/{backend.id}",
            )
        return key


_OF_A_DEPLOYMENT = frozenset({"/chat/completions", "/completions", "/embeddings"})
"""The APIs at whose Azure-style addresses the deployment's name stands; at others the body names the model."""


def _address(dispatch: Dispatch) -> str:
    backend = dispatch.backend
    if not backend.azure:
        return backend.base_url + dispatch.path
    if dispatch.path not in _OF_A_DEPLOYMENT:
        return f"{backend.base_url}/openai{dispatch.path}?api-version={backend.api_version}"
    deployment = quote(dispatch.model, safe="")
    return f"{backend.base_url}/openai/deployments/{deployment}{dispatch.path}?api-version={backend.api_version}"


def open_session(*, connect_timeout_s: float, read_timeout_s: float) -> aiohttp.ClientSession:
    """Opens the connections' pool; to be called in the event loop that will use it.

    Args:
        connect_timeout_s: most seconds for a new connection.
        read_timeout_s: most seconds of silence, before the first byte and between two pieces.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s),
        headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
        skip_auto_headers=("User-Agent",),
        auto_decompress=False,
    )


def _unavailable(backend_id: str, what: str, error: Exception) -> BackendUnavailable:
    # The kind of the error is told, its text is not: it may hold addresses.
    return BackendUnavailable(
        f"The backend '{backend_id}' {what} ({type(error).__name__}).", backend=f"backends/{backend_id}"
    )


def _again(outcome: BackendAnswer | BackendUnavailable) -> bool:
    """Tells whether another try may end better."""
    return isinstance(outcome, BackendUnavailable) or outcome.status == STATUS_OVERLOADED


def _retry_after_s(outcome: BackendAnswer | BackendUnavailable) -> float:
    if isinstance(outcome, BackendUnavailable) or not outcome.retry_after.isdigit():
        return 0.0
    return min(float(outcome.retry_after), _MAX_RETRY_AFTER_S)
