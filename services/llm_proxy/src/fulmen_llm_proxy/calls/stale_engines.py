"""Holds engines that answer with an older policy version than the route assumes.

A version is promoted when its engine has loaded it, so a call that is sent after that gets no older token. One that does
went to another engine: one that lost its weights, or was registered in the place of the right one.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from fulmen.errors import BackendNotFound, FulmenError
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.capture.decode import oldest_reported
from fulmen_llm_proxy.metrics.routing import RoutingMetrics
from fulmen_llm_proxy.routing.codec import backend_resource, parse_backend
from fulmen_llm_proxy.routing.resources import ResourceCache, ResourceWriter
from fulmen_llm_proxy.routing.table import Choice
from fulmen_llm_proxy.routing.table_holder import TableHolder

HOLD_S = 600.0
"""Time for which a stale engine is held, unless it is registered again, seconds; then it gets a call again."""

_NS_PER_S = 1_000_000_000
_log = structlog.get_logger(__name__)


class StaleEngines:
    """Background role: holds the backends of stale engines, at every replica of the proxy.

    Their calls go to other replicas, or wait for the engine's owner, who sees `stale_version` and registers it again.
    """

    def __init__(
        self,
        *,
        writer: ResourceWriter,
        resources: ResourceCache,
        tables: TableHolder,
        metrics: RoutingMetrics,
    ) -> None:
        self._writer = writer
        self._resources = resources
        self._tables = tables
        self._metrics = metrics
        self._found: dict[str, tuple[str, int]] = {}
        """Address and version by backend id."""
        self._news = asyncio.Event()

    def judge(self, choice: Choice, collected: Collected) -> None:
        """Compares the versions that an answer reports with the versions of its target since the call was sent."""
        target, backend = choice.target, choice.backend
        if not target.policy or (version := oldest_reported(collected)) is None:
            return
        # An operator may serve an older version than before.
        now = self._tables.current.version_of(choice.route.model, target)
        changes = [change.version for change in collected.policy_changes]
        expected = min([target.policy_version, *changes, *([] if now is None else [now])])
        if version >= expected:
            return
        self._metrics.found_stale(backend.id)
        _log.warning("stale_engine", backend=backend.id, version=version, expected=expected)
        self._found[backend.id] = (backend.base_url, version)
        self._news.set()

    async def run(self) -> None:
        """Holds the backends that were found, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            for backend_id, (base_url, version) in list(self._found.items()):
                del self._found[backend_id]
                try:
                    await self._hold(backend_id, base_url, version)
                except FulmenError as error:  # its next answer is judged, too
                    _log.warning("stale_engine_not_held", backend=backend_id, reason=error.reason)

    async def _hold(self, backend_id: str, base_url: str, version: int) -> None:
        resource_id = backend_resource(backend_id)
        until_ns = int((time.time() + HOLD_S) * _NS_PER_S)

        def held() -> dict[str, bytes]:
            document = self._resources.find(resource_id)
            if document is None:
                raise BackendNotFound(f"Backend backends/{backend_id} not found.", backend=f"backends/{backend_id}")
            backend = parse_backend(document.content)
            if backend.base_url.rstrip("/") != base_url or backend.stale_version:
                return {}  # another engine has taken its place, or it is held already
            backend.stale_version = version
            backend.hold_until_time.FromNanoseconds(until_ns)
            return {resource_id: backend.SerializeToString(deterministic=True)}

        await self._writer.change(held)
