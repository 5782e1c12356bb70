"""Probes the health of backends and the load of their engines.

Invariant: no call waits for a probe. Its result feeds the backend's circuit breaker; a reported load is kept in the
backend's state only until the next probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import structlog

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.backends.access import BackendKeys
from fulmen_llm_proxy.backends.litellm.gateways import LitellmGateways
from fulmen_llm_proxy.routing.backend_state import UNKNOWN, BackendState, BackendStates
from fulmen_llm_proxy.routing.engines import PROFILES, LoadMetrics, root_of
from fulmen_llm_proxy.routing.table import Backend
from fulmen_llm_proxy.routing.table_holder import TableHolder

_MAX_METRICS_BYTES = 8 * 1024 * 1024
_MAX_VALUE = 1e9
"""Larger values are ignored as invalid."""

_WRONG_PATH = frozenset({401, 403, 404, 405, 501})
"""Statuses that mean a wrong path, not an unhealthy backend."""

_FAILURES = (aiohttp.ClientError, TimeoutError, ValueError)
"""Errors of a probe. ValueError: an address that the client or the resolver cannot read; it must not end the role."""

_log = structlog.get_logger(__name__)


class HealthProbe:
    """Background role: probes every backend that has a health path, and looks after the processes of vendors."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        keys: BackendKeys,
        gateways: LitellmGateways,
        tables: TableHolder,
        states: BackendStates,
        interval_s: float,
        timeout_s: float,
        cache_share: float,
    ) -> None:
        """Initializes the role.

        Args:
            keys: the proxy's own keys for backends, for metrics that ask for one.
            gateways: the processes of vendors that are called through LiteLLM.
            interval_s: pause between two rounds, seconds.
            timeout_s: timeout of a probe, seconds.
            cache_share: share of an engine's cache that the attempts of this process may fill.
        """
        self._session = session
        self._keys = keys
        self._gateways = gateways
        self._tables = tables
        self._states = states
        self._interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._cache_share = cache_share
        self._wrong_paths: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Probes until cancelled."""
        while True:
            await self.probe_once()
            self._states.sweep()
            await asyncio.sleep(self._interval_s)

    async def probe_once(self) -> None:
        """Probes all backends once, concurrently."""
        async with asyncio.TaskGroup() as group:
            for backend in self._tables.current.backends.values():
                path = backend.health_path or PROFILES[backend.engine].health_path
                if backend.provider:
                    self._look_at_gateway(backend)
                elif path:
                    group.create_task(self._probe(backend, path), name=f"probe-{backend.id}")
                else:
                    self._states.of(backend.id).breaker.probed = False

    def _look_at_gateway(self, backend: Backend) -> None:
        """Notes whether the process of a backend takes calls; whether its vendor answers, only calls show."""
        state = self._states.of(backend.id)
        if problem := self._gateways.problem_of(backend):
            state.note_failure(problem)
            state.breaker.probe_failed()
        else:
            state.breaker.probed = False

    async def _probe(self, backend: Backend, path: str) -> None:
        state = self._states.of(backend.id)
        try:
            status, _ = await self._get(backend, path)
        except _FAILURES:
            _forget_load(state)
            state.breaker.probe_failed()
            return
        if status in _WRONG_PATH:
            self._note_wrong_path(backend, path, status)
            state.breaker.probed = False
        elif status < 300:
            state.breaker.probe_succeeded()
        else:
            state.breaker.probe_failed()
        await self._probe_load(backend, state)

    async def _probe_load(self, backend: Backend, state: BackendState) -> None:
        profile = PROFILES[backend.engine]
        if profile.load is None:
            _forget_load(state)
            return
        try:
            status, text = await self._get(backend, profile.metrics_path, self._keys.headers(backend))
        except (*_FAILURES, BackendUnavailable):
            status, text = 0, b""
        waiting, cache_use = read_load(text, profile.load) if status == 200 else (UNKNOWN, float(UNKNOWN))
        state.set_engine_load(waiting, cache_use)
        if status == 200:  # the size of the cache outlives a probe that fails
            state.row.set_cache_tokens(int(read_cache_tokens(text, profile.load) * self._cache_share))

    async def _get(self, backend: Backend, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        url = root_of(backend.base_url) + path
        async with self._session.get(url, timeout=self._timeout, allow_redirects=False, headers=headers) as answer:
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > _MAX_METRICS_BYTES:
                    answer.close()
                    return 0, b""
            return answer.status, bytes(body)

    def _note_wrong_path(self, backend: Backend, path: str, status: int) -> None:
        if (backend.id, path) not in self._wrong_paths:
            self._wrong_paths.add((backend.id, path))
            _log.warning("backend_health_path_wrong", backend=backend.id, path=path, status=status)


def _forget_load(state: BackendState) -> None:
    state.set_engine_load(UNKNOWN, UNKNOWN)


def read_load(text: bytes, metrics: LoadMetrics) -> tuple[int, float]:
    """Reads the waiting requests (summed over series) and the cache use (averaged); UNKNOWN if not reported."""
    waiting, cache = _samples(text, metrics.waiting), _samples(text, metrics.cache_use)
    return (
        int(sum(waiting)) if waiting else UNKNOWN,
        sum(cache) / len(cache) if cache else float(UNKNOWN),
    )


def read_cache_tokens(text: bytes, metrics: LoadMetrics) -> int:
    """Reads the size of the key-value cache, tokens, summed over series; 0 if not reported."""
    return sum(map(int, metrics.cache_tokens.findall(text)))


def _samples(text: bytes, name: str) -> list[float]:
    """Returns the values of a metric from a page in Prometheus text format."""
    found, values, start = name.encode(), [], 0
    while (start := text.find(found, start)) >= 0:
        end = text.find(b"\n", start)
        line = text[start : end if end >= 0 else len(text)]
        begins = start == 0 or text[start - 1 : start] == b"\n"
        start += len(found)
        if not begins or line[len(found) : len(found) + 1] not in (b"{", b" "):
            continue
        fields = line[len(found) :].rpartition(b"}")[2].split()
        try:
            value = float(fields[0])
        except (ValueError, IndexError):
            continue
        if 0 <= value <= _MAX_VALUE:  # excludes NaN
            values.append(value)
    return values
