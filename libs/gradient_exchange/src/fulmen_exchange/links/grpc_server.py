"""A server of a shard, as ranks call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.algorithm.v1.gradient_exchange_service_pb2_grpc import GradientExchangeServiceStub
from fulmen.rpc.channel import DuplexStream, FulmenChannel, Token, open_channel
from fulmen.rpc.tls import TlsFiles
from fulmen_exchange.links import grpc_chunks
from fulmen_exchange.links.grpc_chunks import ReadChunk

STREAM = "/fulmen.algorithm.v1.GradientExchangeService/Exchange"

Stream = DuplexStream[bytes | pb.ExchangeRequest, ReadChunk | pb.ExchangeResponse]


@dataclass(frozen=True, slots=True, eq=False)
class ShardServer:
    """One server.

    Attributes:
        address: Its address, `host:port`.
        stub: Its unary calls.
        open_stream: Opens a stream of chunks.
    """

    address: str
    stub: GradientExchangeServiceStub
    open_stream: Callable[[], Stream]

    @classmethod
    def at(cls, address: str, channel: FulmenChannel) -> ShardServer:
        """Returns the server behind a channel."""
        open_stream = channel.stream_stream(
            STREAM,
            request_serializer=grpc_chunks.write,
            response_deserializer=partial(grpc_chunks.read, pb.ExchangeResponse),
        )
        return cls(address, GradientExchangeServiceStub(channel), open_stream)


def dial(target: str, *, token: Token = None, tls: TlsFiles | None = None) -> FulmenChannel:
    """Opens a channel to a server of shards; see `open_channel`. Links repeat calls themselves."""
    return open_channel(target, token=token, tls=tls, retries=False)
