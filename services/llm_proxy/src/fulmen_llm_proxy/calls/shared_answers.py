"""The answer cache that proxies share, in a server that speaks Redis's protocol.

Invariant: it costs a call nothing but the miss. A lookup has a deadline, after a failure none is made for a while, and
answers are written after the caller has them. Values are sealed with the secret of attempt keys and bound to their keys:
what another client of the server has changed or written is never read as an answer, and the server's operator reads none.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from fulmen_llm_proxy.apis.api import UNREADABLE
from fulmen_llm_proxy.metrics.shared_answers import SharedAnswerMetrics
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.security.sealing import ANSWERS_LABEL, CannotOpen, Sealer

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_ANSWER_BYTES: Final = 1024 * 1024
"""Largest answer that is shared."""

_DEADLINE_S: Final = 0.05
_PAUSE_S: Final = 1.0
"""Time without lookups and writes after a failure."""
_TIMEOUT_S: Final = 1.0
"""Of one command; a lookup whose deadline has passed continues for this long, as does a connection that it has opened."""
_CONNECTIONS: Final = 32
_MAX_WAITING_BYTES: Final = 16 * 1024 * 1024
_OVERHEAD_BYTES: Final = 1024
_PREFIX: Final = "fulmen:answer:"
_NO_KEYS: Final = (b"",)  # development mode

_encode = msgspec.msgpack.Encoder().encode
_log = structlog.get_logger(__name__)


class SharedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An answer; `expires_s` is Unix time, seconds."""

    expires_s: float
    content_type: bytes
    body: bytes


_ANSWER = msgspec.msgpack.Decoder(SharedAnswer)


class SharedAnswers:
    """Reads and writes answers; owned by one event loop."""

    def __init__(
        self,
        client: Redis,
        *,
        refusal: type[Exception],
        secrets: Callable[[], Sequence[bytes]],
        ttl_s: float,
        metrics: SharedAnswerMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Sets the client.

        Args:
            refusal: what the client raises if the server refuses a command.
            secrets: secrets that all proxies share: the first one seals and names, all open.
            ttl_s: lifetime of an answer, seconds.
            clock: Unix time, seconds.
        """
        self._client: Any = client
        self._refusal = refusal
        self._secrets = secrets
        self._sealer = Sealer(lambda: tuple(secrets()) or _NO_KEYS, ANSWERS_LABEL)
        self._ttl_s = ttl_s
        self._metrics = metrics
        self._clock = clock
        self._asked_again = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting_bytes = 0

    async def find(self, key: bytes) -> SharedAnswer | None:
        """Returns an unexpired answer; None without one, or if the server does not answer in time."""
        if self._is_paused():
            self._metrics.ended("failed")
            return None
        name = self._name(key)
        # One byte more than an answer may have: a value of any size is read in bounded memory and time.
        lookup = self._client.getrange(name, 0, MAX_ANSWER_BYTES + _OVERHEAD_BYTES)
        task = self._started(lookup)
        await asyncio.wait({task}, timeout=_DEADLINE_S)
        if not task.done() or task.cancelled():
            self._failed("lookup", "no answer in time")
            return None
        if (error := task.exception()) is not None:
            if isinstance(error, self._refusal):
                self._metrics.ended("unreadable")  # the value is of another type
            else:
                self._failed("lookup", type(error).__name__)
            return None
        value = task.result()
        found = self._opened(name, value)
        self._metrics.ended("miss" if not value else "unreadable" if found is None else "hit")
        return found

    def put(self, key: bytes, content_type: bytes, body: bytes) -> None:
        """Writes an answer later, unless it is too large or too many wait to be written."""
        size_bytes = len(body) + len(content_type)
        if size_bytes > MAX_ANSWER_BYTES or self._waiting_bytes + size_bytes > _MAX_WAITING_BYTES or self._is_paused():
            self._metrics.ended("not_stored")
            return
        self._waiting_bytes += size_bytes
        answer = SharedAnswer(self._clock() + self._ttl_s, content_type, body)
        self._started(self._put(self._name(key), answer, size_bytes))

    async def close(self) -> None:
        """Ends what is running, and closes the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _put(self, name: str, answer: SharedAnswer, size_bytes: int) -> None:
        outcome = "not_stored"
        try:
            sealed = self._sealer.seal(_encode(answer), about=name)
            await self._client.set(name, sealed, px=max(1, int(self._ttl_s * 1000)))
            outcome = "stored"
        except Exception as error:  # noqa: BLE001 - whatever a client's library raises costs the cache only
            self._failed("write", type(error).__name__, count=False)
        finally:
            self._waiting_bytes -= size_bytes
            self._metrics.ended(outcome)

    def _name(self, key: bytes) -> str:
        """Returns the name of a key, from which no one else can tell whether a request was made."""
        first = next(iter(self._secrets() or _NO_KEYS))
        return _PREFIX + hmac.digest(first, ANSWERS_LABEL + key, "sha256").hex()

    def _opened(self, name: str, value: bytes) -> SharedAnswer | None:
        if not value:
            return None
        try:
            answer = _ANSWER.decode(self._sealer.open(value, about=name))
        except (CannotOpen, *UNREADABLE):
            return None
        # The server forgets what has expired; a value that was written back would not.
        return answer if answer.expires_s > self._clock() else None

    def _started(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a lookup that no one waits for any more

    def _is_paused(self) -> bool:
        return time.monotonic() < self._asked_again

    def _failed(self, what: str, reason: str, *, count: bool = True) -> None:
        """Records a failure. The reason is not a text of the library, which might quote an address or a password."""
        if not self._is_paused():
            _log.warning("shared_cache_failed", what=what, reason=reason)
        self._asked_again = time.monotonic() + _PAUSE_S
        if count:
            self._metrics.ended("failed")


def open_shared_answers(
    url: str, *, secrets: Callable[[], Sequence[bytes]], ttl_s: float, metrics: SharedAnswerMetrics
) -> SharedAnswers:
    """Returns the cache at a URL, `redis://`, `rediss://` (TLS) or `unix://`; connects at the first lookup.

    Raises:
        StartupError: if the package for it is not installed, or the URL is invalid.
    """
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import ResponseError
    except ImportError:
        raise StartupError("cache_url needs the package redis: install fulmen-llm-proxy[cache]") from None
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except (ValueError, TypeError):
        # Without its text, which may quote the password.
        raise StartupError("cache_url is not valid: redis://, rediss:// or unix:// with options of redis-py") from None
    client = Redis.from_pool(pool)  # closes the pool, too
    return SharedAnswers(client, refusal=ResponseError, secrets=secrets, ttl_s=ttl_s, metrics=metrics)
