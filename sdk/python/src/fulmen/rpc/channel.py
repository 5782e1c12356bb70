"""Channels to Fulmen's services: they add the token and a deadline for every unary call, and decode errors.

A generated stub over such a channel raises the classes of `fulmen.errors`; nothing else about the stub changes.
grpc retries calls on UNAVAILABLE, a few times within their deadline. A stream of answers is not retried after the first one,
and a stream of requests never: only its caller knows how to resume it.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from fulmen.errors import FulmenError, InternalError, Unavailable
from fulmen.rpc.credentials import channel_credentials
from fulmen.rpc.status import decode
from fulmen.rpc.tls import TlsFiles, TlsWatch

Request = TypeVar("Request")
Response = TypeVar("Response")
Metadata = tuple[tuple[str, str], ...]

DEFAULT_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
LEAVE_S = 3600.0
"""Grace period of calls on a connection with a replaced certificate, seconds."""

Token = str | Callable[[], str | None] | None

CLIENT_STREAMS = frozenset(
    {
        "/fulmen.algorithm.v1.EngineService/JoinEngine",
        "/fulmen.algorithm.v1.GradientExchangeService/Exchange",
        "/fulmen.algorithm.v1.RankService/JoinRanks",
        "/fulmen.algorithm.v1.WeightService/UploadChunks",
        "/fulmen.store.v1.LeaseService/StreamLeases",
        "/fulmen.store.v1.RolloutService/StreamCreateRollouts",
        "/fulmen.store.v1.SpanService/AppendSpans",
    }
)
"""Rpcs whose requests are a stream. grpc keeps requests until the first answer in order to send them again; a connection that breaks
meanwhile may end the process ("ILLEGAL STATE: FORWARDED_BATCH", grpc/grpc issue 40283). So these have no policy of retries, which
a name in the service config decides. A channel refuses others."""


def _names(methods: Iterable[str]) -> list[dict[str, str]]:
    """Returns methods as a service config names them."""
    parts = [method.removeprefix("/").split("/") for method in sorted(methods)]
    return [{"service": service, "method": method} for service, method in parts]


_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            },
            {"name": _names(CLIENT_STREAMS)},
        ],
        "loadBalancingConfig": [{"round_robin": {}}],
    }
)

_OPTIONS = (
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Reconnects within a second after a server's restart; grpc's default takes up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class _Line:
    """The connection to a target, replaced for new calls when the TLS files change."""

    def __init__(self, target: str, tls: TlsFiles | None, *, retries: bool) -> None:
        self._target = target
        options = _OPTIONS if retries else (*_OPTIONS, ("grpc.enable_retries", 0))
        self._options = options if tls is None else (*options, *tls.options())
        self._watch = None if tls is None else TlsWatch(tls)
        self._material = None if self._watch is None else self._watch.material()
        self._channel = self._dial()
        self._leaving: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def current(self) -> grpc.aio.Channel:
        """Returns the channel for the next call."""
        if self._watch is not None:
            material = self._watch.material()
            if material is not self._material:
                leaving = asyncio.create_task(self._channel.close(LEAVE_S), name="leave a connection")
                self._leaving[leaving] = self._channel
                leaving.add_done_callback(lambda done: self._leaving.pop(done, None))
                self._material = material
                self._channel = self._dial()
        return self._channel

    async def close(self, grace: float | None) -> None:
        """Closes all connections, including replaced ones."""
        left = dict(self._leaving)
        for leaving in left:
            leaving.cancel()
        await asyncio.gather(*(channel.close(grace) for channel in (*left.values(), self._channel)))

    def _dial(self) -> grpc.aio.Channel:
        if self._material is None:
            return grpc.aio.insecure_channel(self._target, options=self._options)
        return grpc.aio.secure_channel(self._target, channel_credentials(self._material), options=self._options)


class FulmenChannel:
    """The channel interface of generated stubs; see `open_channel`."""

    def __init__(self, line: _Line, *, token: Token, timeout_s: float) -> None:
        self._line = line
        self._token = token
        self._timeout_s = timeout_s

    def _calling(self, kind: str, method: str, args: Any, kwargs: Any) -> Callable[[], Any]:
        """Returns a factory of gRPC's callable of a method, on the current connection.

        Raises:
            ValueError: for a stream of requests that is not in `CLIENT_STREAMS`.
        """
        if kind.startswith("stream_") and method not in CLIENT_STREAMS:
            raise ValueError(
                f"{method} takes a stream of requests, and is not one of CLIENT_STREAMS: grpc would retry it."
            )
        channel: grpc.aio.Channel | None = None
        call: Any = None

        def current() -> Any:
            nonlocal channel, call
            now = self._line.current()
            if now is not channel:
                channel, call = now, getattr(now, kind)(method, *args, **kwargs)
            return call

        return current

    def _metadata(self, more: Metadata) -> Metadata:
        token = self._token() if callable(self._token) else self._token
        # A token from a hand-written file or variable may end with a newline, which headers cannot contain.
        own = (("authorization", f"Bearer {token.strip()}"),) if token else ()
        return (*own, *_trace_context(), *more)

    def plain(self) -> grpc.aio.Channel:
        """Returns gRPC's own channel, without token and with gRPC's errors: for trailers, which stubs do not show."""
        return self._line.current()

    async def __aenter__(self) -> "FulmenChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes the connection; calls in flight end with Unavailable."""
        await self._line.close(grace)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns the callable of a unary rpc: `await stub.Rpc(request, timeout=seconds)`."""
        calling = self._calling("unary_unary", method, args, kwargs)

        async def invoke(
            request: Any, *, timeout: float | None = None, metadata: Metadata = (), wait_for_ready: bool | None = None
        ) -> Any:
            try:
                return await calling()(
                    request,
                    timeout=self._timeout_s if timeout is None else timeout,
                    metadata=self._metadata(metadata),
                    wait_for_ready=wait_for_ready,
                )
            except grpc.aio.AioRpcError as error:
                raise decode(error) from None

        return invoke

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., "ResponseStream[Any]"]:
        """Returns the callable of a server stream: `async for message in stub.Rpc(request)`."""
        calling = self._calling("unary_stream", method, args, kwargs)

        def invoke(
            request: Any, *, timeout: float | None = None, metadata: Metadata = (), wait_for_ready: bool | None = None
        ) -> ResponseStream[Any]:
            return ResponseStream(
                calling()(
                    request,
                    timeout=timeout,
                    metadata=self._metadata(metadata),
                    wait_for_ready=wait_for_ready,
                )
            )

        return invoke

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns the callable of a client stream: `await stub.Rpc(requests, timeout=seconds)`."""
        calling = self._calling("stream_unary", method, args, kwargs)

        async def invoke(
            requests: AsyncIterable[Any] | Iterable[Any], *, timeout: float | None = None, metadata: Metadata = ()
        ) -> Any:
            try:
                return await calling()(
                    requests,
                    timeout=self._timeout_s if timeout is None else timeout,
                    metadata=self._metadata(metadata),
                )
            except grpc.aio.AioRpcError as error:
                raise decode(error) from None

        return invoke

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., "DuplexStream[Any, Any]"]:
        """Returns the callable of a bidirectional stream, with `write`, `read`, `done_writing`, `cancel`."""
        calling = self._calling("stream_stream", method, args, kwargs)

        def invoke(
            requests: AsyncIterable[Any] | Iterable[Any] | None = None,
            *,
            timeout: float | None = None,
            metadata: Metadata = (),
            wait_for_ready: bool | None = None,
        ) -> DuplexStream[Any, Any]:
            return DuplexStream(
                calling()(
                    requests,
                    timeout=timeout,
                    metadata=self._metadata(metadata),
                    wait_for_ready=wait_for_ready,
                )
            )

        return invoke


def _trace_context() -> Metadata:
    """Returns the current span as W3C trace context, the parent of the server's span; empty without one."""
    # If the module is not imported, there is no span.
    trace = sys.modules.get("opentelemetry.trace")
    context = trace.get_current_span().get_span_context() if trace is not None else None
    if context is None or not context.is_valid:
        return ()
    return (("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"),)


class ResponseStream(Generic[Response]):
    """The responses of a stream; errors are from `fulmen.errors`."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Response | Any:
        """Returns the next message, or `grpc.aio.EOF` at the end of the stream."""
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _of_stream(error) from None

    def cancel(self) -> None:
        """Cancels the call."""
        self._call.cancel()


class DuplexStream(ResponseStream[Response], Generic[Request, Response]):
    """A bidirectional stream; several tasks may write to it."""

    def __init__(self, call: Any) -> None:
        super().__init__(call)
        # In gRPC's core, a second write during the first one breaks the call.
        self._writing = asyncio.Lock()

    async def write(self, message: Request) -> None:
        """Sends one message; waits while the connection is full or another task writes."""
        try:
            async with self._writing:
                await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise _of_stream(error) from None
        except asyncio.InvalidStateError:
            raise await self._why_ended() from None
        except grpc.aio.InternalError:
            # The call ended during the write in gRPC's core.
            raise await self._ending() from None

    async def done_writing(self) -> None:
        """Half-closes the stream."""
        try:
            async with self._writing:
                await self._call.done_writing()
        except grpc.aio.AioRpcError as error:
            raise _of_stream(error) from None
        except asyncio.InvalidStateError:
            raise await self._why_ended() from None
        except grpc.aio.InternalError:
            # The call ended during the write in gRPC's core.
            raise await self._ending() from None

    async def _why_ended(self) -> Exception:
        """Returns the error of an ended stream, which grpc.aio does not report to a writer."""
        if not self._call.done():
            return asyncio.InvalidStateError("The stream accepts no more messages: done_writing was called.")
        return await self._ending()

    async def _ending(self) -> Exception:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return Unavailable("The server has closed the stream.")
        trailing = await self._call.trailing_metadata()
        return _of_stream(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))


def _of_stream(error: grpc.aio.AioRpcError) -> FulmenError:
    """Decodes the error of a stream; grpc reports a broken connection as INTERNAL without details."""
    decoded = decode(error)
    if isinstance(decoded, InternalError) and not decoded.metadata:
        return Unavailable(f"The stream was interrupted: {decoded.message}")
    return decoded


def open_channel(
    target: str,
    *,
    token: Token = None,
    tls: TlsFiles | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    retries: bool = True,
) -> FulmenChannel:
    """Opens a channel to a service; it connects at the first call and reconnects automatically.

    Args:
        target: `host:port`, or a gRPC name such as `dns:///store:7101`.
        token: Token sent as `authorization: Bearer` with every call; a function for a token that changes.
        tls: Files for TLS; None for no TLS. When they change, new calls use a new connection.
        timeout_s: Default deadline of unary calls, in seconds.
        retries: Whether grpc retries calls other than streams of requests; false for callers that retry calls
            themselves.

    Raises:
        OSError: if a file of `tls` cannot be read.
    """
    return FulmenChannel(_Line(target, tls, retries=retries), token=token, timeout_s=timeout_s)
