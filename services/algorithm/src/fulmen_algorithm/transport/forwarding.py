"""Forwards a call about a run to the algorithm service that runs it, with the caller's own token."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from fulmen.algorithm.v1 import training_run_service_pb2 as pb
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.errors import Draining
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.rpc.tls import TlsFiles

FORWARDED = "fulmen-forwarded"
DEADLINE_S = 30.0
BEARER = "bearer "


class Forwarding:
    """Calls other algorithm services.

    Attributes:
        own_address: Returns `host:port` at which they call this one.
    """

    def __init__(self, tls: TlsFiles | None, own_address: Callable[[], str]) -> None:
        """`tls` are the files for calls to the service's own replicas."""
        self._tls = tls
        self.own_address = own_address

    async def call(
        self, address: str, rpc: str, request: Any, context: grpc.aio.ServicerContext, *, limit_s: float = DEADLINE_S
    ) -> Any:
        """Forwards a unary call, for at most `limit_s` seconds; errors are the owner's.

        Raises:
            Draining: if the call was forwarded before: both services are behind; the caller repeats it.
        """
        remaining = context.time_remaining()
        async with self._channel(address, context) as channel:
            stub = getattr(TrainingRunServiceStub(channel), rpc)
            timeout = limit_s if remaining is None else min(remaining, limit_s)
            return await stub(request, timeout=timeout, metadata=((FORWARDED, "1"),))

    async def watch(
        self, address: str, request: pb.WatchTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchTrainingRunResponse]:
        """Forwards a watch; see `call`."""
        async for message in self.stream(address, TrainingRunServiceStub, "WatchTrainingRun", request, context):
            yield message

    async def stream(
        self, address: str, service: Any, rpc: str, said: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        """Forwards a streaming call to the rpc of a service's stub; see `call`. `said` is the request, or all of them."""
        async with self._channel(address, context) as channel:
            stream = getattr(service(channel), rpc)(said, metadata=((FORWARDED, "1"),))
            try:
                async for message in stream:
                    yield message
            finally:
                stream.cancel()

    def _channel(self, address: str, context: grpc.aio.ServicerContext) -> FulmenChannel:
        metadata = {key.lower(): value for key, value in context.invocation_metadata() or ()}
        if FORWARDED in metadata:
            raise Draining("The owner of the run is changing: repeat the call.")
        authorization = str(metadata.get("authorization", ""))
        token = authorization[len(BEARER) :] if authorization.lower().startswith(BEARER) else None
        return open_channel(address, token=token, tls=self._tls)
