"""The gateway: one endpoint of the Connect protocol per rpc, made from its descriptor. It holds no rules and caches nothing.

A service sees the token of the caller, and decides. Source: https://connectrpc.com/docs/protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
from connectrpc.compat import google_protobuf_binary_codec, google_protobuf_json_codec
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from fulmen.errors import FulmenError
from fulmen.rpc.channel import FulmenChannel
from fulmen_console.gateway.access import Access, authorization
from fulmen_console.gateway.methods import Target, forwarded_methods
from fulmen_console.gateway.wire_errors import connect_error

__all__ = ["MAX_REQUEST_BYTES", "Gateway", "StreamLimits"]

MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024
DEFAULT_TIMEOUT_S: Final = 30.0
MAX_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Times of streams.

    Attributes:
        heartbeat_s: Time without a message after which an empty one is sent, seconds.
        limit_s: Time after which a stream ends, seconds; its client resumes it.
        stopping: Set to end all streams.
    """

    heartbeat_s: float
    limit_s: float
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


class Gateway(ConnectASGIApplication[None]):
    """The ASGI application: `POST /{service}/{rpc}`, as JSON or protobuf."""

    path = "/"

    def __init__(self, channels: Mapping[Target, FulmenChannel], *, access: Access, limits: StreamLimits) -> None:
        """Initializes the gateway.

        Args:
            channels: Channels without a token, by service; rpcs of a service without one are not found.
            access: Authenticates callers before their requests are read.
            limits: Times of streams.
        """
        endpoints = {
            f"/{method.containing_service.full_name}/{method.name}": _endpoint(method, channel, limits)
            for target, channel in channels.items()
            for method in forwarded_methods(target)
        }
        super().__init__(
            service=None,
            endpoints=lambda _: endpoints,
            interceptors=(access,),
            read_max_bytes=MAX_REQUEST_BYTES,
            # Unknown fields are errors: a misspelt filter must not select everything.
            codecs=(google_protobuf_binary_codec(), google_protobuf_json_codec(ignore_unknown_fields=False)),
        )
        self.paths = frozenset(endpoints)


def _endpoint(
    method: MethodDescriptor, channel: FulmenChannel, limits: StreamLimits
) -> Any:  # of a closed union that is not exported
    request_class, response_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    path = f"/{method.containing_service.full_name}/{method.name}"
    info = MethodInfo(
        name=method.name,
        service_name=method.containing_service.full_name,
        input=request_class,
        output=response_class,
        # Not NO_SIDE_EFFECTS: calls by GET would put requests into the logs of proxies.
        idempotency_level=IdempotencyLevel.UNKNOWN,
        stream_type=StreamType.SERVER_STREAM if method.server_streaming else StreamType.UNARY,
    )
    coded: Any = {
        "request_serializer": request_class.SerializeToString,
        "response_deserializer": response_class.FromString,
    }
    if method.server_streaming:
        stream_call = channel.unary_stream(path, **coded)

        def stream(request: Message, _: RequestContext[Message, Message]) -> AsyncIterator[Message]:
            return _with_heartbeats(stream_call, request, response_class(), limits)

        return Endpoint.server_stream(info, stream)
    unary_call = channel.unary_unary(path, **coded)

    async def unary(request: Message, context: RequestContext[Message, Message]) -> Message:
        try:
            answer: Message = await unary_call(request, timeout=_timeout_s(context), metadata=_metadata())
        except FulmenError as error:
            raise connect_error(error) from None
        return answer

    return Endpoint.unary(info, unary)


async def _with_heartbeats(
    call: Any, request: Message, heartbeat: Message, limits: StreamLimits
) -> AsyncIterator[Message]:
    """Yields the messages of a stream, an empty one first and whenever there was none for a while.

    The first one brings the headers to the browser; the others show that the connection holds.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + limits.limit_s
    answers = call(request, metadata=_metadata())
    stopping = asyncio.create_task(limits.stopping.wait(), name="wait for the end of the console")
    reading: asyncio.Task[Any] | None = None
    try:
        yield heartbeat
        while (left_s := ends_at - loop.time()) > 0 and not stopping.done():
            reading = reading or asyncio.create_task(answers.read(), name="read a stream")
            await asyncio.wait(
                {reading, stopping}, timeout=min(limits.heartbeat_s, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if not reading.done():
                if not stopping.done() and loop.time() < ends_at:
                    yield heartbeat
                continue
            message = reading.result()
            reading = None
            if message is grpc.aio.EOF:
                return
            yield message
    except FulmenError as error:
        raise connect_error(error) from None
    finally:
        answers.cancel()
        stopping.cancel()
        if reading is not None:
            reading.cancel()
            await asyncio.wait({reading})


def _timeout_s(context: RequestContext[Message, Message]) -> float:
    left_ms = context.timeout_ms
    return DEFAULT_TIMEOUT_S if left_ms is None else min(max(left_ms / 1000, 0.0), MAX_TIMEOUT_S)


def _metadata() -> tuple[tuple[str, str], ...]:
    token = authorization()
    return (("authorization", token),) if token else ()
