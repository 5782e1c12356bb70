"""`GET /services`: which services answer and are ready, as reported by each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from grpc_health.v1 import health_pb2

from fulmen.errors import FulmenError
from fulmen.rpc.channel import FulmenChannel
from fulmen_console.gateway.methods import Target
from fulmen_service_kit.http.wire import Receive, Scope, Send, respond
from fulmen_service_kit.security.tokens import Caller

__all__ = ["SERVICES_PATH", "ServicesApp"]

SERVICES_PATH: Final = "/services"
LIMIT_S: Final = 3.0
"""Time for a service's answer, seconds."""
_CHECK: Final = "/grpc.health.v1.Health/Check"


class ServicesApp:
    """Answers the requests of `SERVICES_PATH`: `{"services": [{"name": "store", "status": "SERVING"}]}`."""

    def __init__(
        self, channels: Mapping[Target, FulmenChannel], identify: Callable[[Scope], Awaitable[Caller]]
    ) -> None:
        self._checks: dict[Target, Any] = {
            target: channel.unary_unary(
                _CHECK,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            for target, channel in channels.items()
        }
        self._identify = identify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI). Raises FulmenError if no one is signed in."""
        await self._identify(scope)
        states = await asyncio.gather(*(self._status(target) for target in self._checks))
        shown = [{"name": str(target), "status": status} for target, status in zip(self._checks, states, strict=True)]
        await respond(send, 200, json.dumps({"services": shown}).encode(), unread=receive)

    async def _status(self, target: Target) -> str:
        try:
            answer = await self._checks[target](health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        except FulmenError:
            return "UNREACHABLE"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
