"""Every rpc that a server lists by reflection, called by name with messages or with raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import fulmen
from fulmen.errors import FulmenError, Unavailable
from fulmen.rpc.status import decode

__all__ = ["Rpc", "answer_of", "exchange", "listed_rpcs"]

PROBE_SERVICES = ("grpc.health.", "grpc.reflection.")
LIMIT_S = 20.0
BROKEN_OFF = "Internal error from Core"
TRIES = 10

Outcome = list[Message] | FulmenError


class Rpc:
    """One rpc and its classes."""

    def __init__(self, method: MethodDescriptor) -> None:
        self.method = method
        self.path = f"/{method.containing_service.full_name}/{method.name}"
        self.request_class: type[Message] = message_factory.GetMessageClass(method.input_type)
        self.response_class: type[Message] = message_factory.GetMessageClass(method.output_type)


async def listed_rpcs(channel: grpc.aio.Channel) -> dict[str, Rpc]:
    """Returns the rpcs of every service that the server lists by reflection, but its health and reflection, by path."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(timeout=LIMIT_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    services = [service.name for service in (await call.read()).list_services_response.service]
    call.cancel()
    # A service is found once its module is loaded.
    for file in Path(fulmen.__path__[0]).glob("*/v1/*_service_pb2.py"):
        import_module(f"fulmen.{file.parts[-3]}.v1.{file.stem}")
    pool = descriptor_pool.Default()
    rpcs = [
        Rpc(method)
        for service in services
        if not service.startswith(PROBE_SERVICES)
        for method in pool.FindServiceByName(service).methods
    ]
    return {rpc.path: rpc for rpc in rpcs}


async def exchange(
    channel: grpc.aio.Channel,
    rpc: Rpc,
    payloads: Sequence[bytes],
    *,
    metadata: Sequence[tuple[str, Any]] = (),
    answers: int = 1,
    timeout_s: float = LIMIT_S,
) -> Outcome:
    """Sends raw messages and reads up to so many answers; returns them, or the error that came instead.

    gRPC forgets the answer of a server that ends a call while the client still writes into it: such a call is made anew,
    and `Unavailable` is what is left when it never gets to its answer.
    """
    for _ in range(TRIES):
        outcome = await _exchange_once(channel, rpc, payloads, metadata, answers, timeout_s)
        if outcome is not None:
            return outcome
    return Unavailable("The call was ended while messages were sent.")


async def _exchange_once(
    channel: grpc.aio.Channel,
    rpc: Rpc,
    payloads: Sequence[bytes],
    metadata: Sequence[tuple[str, Any]],
    answers: int,
    timeout_s: float,
) -> Outcome | None:
    """Makes one call; returns None if its answer was lost."""
    serve = channel.stream_stream(
        rpc.path, request_serializer=bytes, response_deserializer=rpc.response_class.FromString
    )
    call = serve(metadata=tuple(metadata), timeout=timeout_s)
    found: list[Message] = []
    try:
        await _send(call, payloads, close=not rpc.method.client_streaming)
        while len(found) < answers:
            message = await call.read()
            if message is grpc.aio.EOF:
                break
            found.append(message)
    except grpc.aio.AioRpcError as error:
        return None if error.details() == BROKEN_OFF else decode(error)
    finally:
        call.cancel()
    return found


async def answer_of(channel: grpc.aio.Channel, rpc: Rpc, *requests: Message, token: str, answers: int = 1) -> Outcome:
    """Sends messages with a token, as `exchange` does."""
    metadata = (("authorization", f"Bearer {token}"),)
    payloads = [request.SerializeToString() for request in requests]
    return await exchange(channel, rpc, payloads, metadata=metadata, answers=answers)


async def _send(call: Any, payloads: Sequence[bytes], *, close: bool) -> None:
    # A call that has ended takes no more messages; why it ended is read afterwards.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
        for payload in payloads:
            await call.write(payload)
        if close:
            await call.done_writing()
