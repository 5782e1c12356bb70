"""gRPC health of the store: alive always, ready while it can do its work.

The empty service name stays SERVING while PostgreSQL is away, since a restart of the store would help nobody; the name
`fulmen.store.v1`, which readiness probes ask for, and every service of the store are then NOT_SERVING.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from grpc_health.v1 import health_pb2

from fulmen_service_kit.server import RpcServer

__all__ = ["READINESS_NAME", "StoreHealth"]

READINESS_NAME: Final = "fulmen.store.v1"


class StoreHealth:
    """Keeps the store's health up to date."""

    def __init__(self, server: RpcServer, *, stopping: Callable[[], bool]) -> None:
        """Takes the server, and what tells that it stops: a store that stops is not ready, whatever PostgreSQL is."""
        self._server = server
        self._stopping = stopping

    async def set_ready(self, ready: bool) -> None:
        """Tells probes whether the store can do its work."""
        serving = ready and not self._stopping()
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in (READINESS_NAME, *self._server.service_names):
            await self._server.health.set(name, status)
