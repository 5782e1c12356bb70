"""A client that knows nothing but the contracts of the last release."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, MethodDescriptor
from google.protobuf.message import Message

from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.store.running import LIMIT_S

__all__ = ["LAST_RELEASE", "OldClient", "descriptors", "last_pool", "old_token"]

# Made by `buf build protos --exclude-source-info --output tests/contract/data/last_release.binpb` at the commit of the
# release. Before the first one it is made anew with every change of the contracts: it becomes the first baseline.
LAST_RELEASE = Path(__file__).parents[1] / "contract" / "data" / "last_release.binpb"


def files() -> Iterable[descriptor_pb2.FileDescriptorProto]:
    """Returns the released files and all that they import, in an order in which each can be added."""
    return descriptor_pb2.FileDescriptorSet.FromString(LAST_RELEASE.read_bytes()).file


@cache
def last_pool() -> descriptor_pool.DescriptorPool:
    """Makes a pool of the released contracts, apart from those of this version."""
    pool = descriptor_pool.DescriptorPool()
    for file in files():
        pool.Add(file)
    return pool


def descriptors(package: str) -> Iterator[Descriptor | EnumDescriptor | MethodDescriptor]:
    """Yields the released messages, enums and rpcs of a package."""
    pool = last_pool()
    for file in files():
        if file.package == package:
            found = pool.FindFileByName(file.name)
            yield from found.message_types_by_name.values()
            yield from found.enum_types_by_name.values()
            for service in found.services_by_name.values():
                yield from service.methods


def old_token(signing_key: str, role: str) -> str:
    """Issues a token to a service of the last release, which sends it as it is."""
    return TokenSigner(signing_key).issue(Role(role), subject="old", ttl_s=600, project="projects/default")


class OldClient:
    """Calls rpcs by name with messages of the last release."""

    def __init__(self, channel: grpc.aio.Channel, token: str, *, package: str = "fulmen.store.v1") -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._package = package

    def message(self, kind: str, **fields: Any) -> Message:
        """Makes a message."""
        return message_factory.GetMessageClass(last_pool().FindMessageTypeByName(f"{self._package}.{kind}"))(**fields)

    def number(self, enum: str, name: str) -> int:
        """Returns the number of an enum's value."""
        return int(last_pool().FindEnumTypeByName(f"{self._package}.{enum}").values_by_name[name].number)

    async def call(self, rpc: str, **fields: Any) -> Any:
        """Calls a unary rpc, `Service.Rpc`."""
        method = self._method(rpc)
        return await self._callable(method)(
            self.message(method.input_type.name, **fields), metadata=self._metadata, timeout=LIMIT_S
        )

    def watch(self, rpc: str, **fields: Any) -> Any:
        """Opens a stream of answers."""
        method = self._method(rpc)
        request = self.message(method.input_type.name, **fields)
        return self._callable(method)(request, metadata=self._metadata, timeout=LIMIT_S)

    def stream(self, rpc: str) -> OldStream:
        """Opens a stream in both directions."""
        method = self._method(rpc)
        return OldStream(self._callable(method)(metadata=self._metadata, timeout=LIMIT_S), self, method)

    def _method(self, rpc: str) -> MethodDescriptor:
        service, _, name = rpc.partition(".")
        found: MethodDescriptor = last_pool().FindServiceByName(f"{self._package}.{service}").methods_by_name[name]
        return found

    def _callable(self, method: MethodDescriptor) -> Any:
        kinds = {
            (False, False): self._channel.unary_unary,
            (False, True): self._channel.unary_stream,
            (True, True): self._channel.stream_stream,
        }
        return kinds[method.client_streaming, method.server_streaming](
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )


class OldStream:
    """A stream in both directions."""

    def __init__(self, call: Any, client: OldClient, method: MethodDescriptor) -> None:
        self._call, self._client, self._method = call, client, method

    async def send(self, **fields: Any) -> None:
        """Sends one message."""
        await self._call.write(self._client.message(self._method.input_type.name, **fields))

    async def read(self) -> Any:
        """Reads one message."""
        async with asyncio.timeout(LIMIT_S):
            return await self._call.read()

    async def expect(self, kind: str) -> Any:
        """Reads until a kind of message comes."""
        while (message := await self.read()).WhichOneof("message") != kind:
            assert message is not grpc.aio.EOF
        return getattr(message, kind)

    async def close(self) -> None:
        """Ends the stream well."""
        await self._call.done_writing()
        assert await self.read() is grpc.aio.EOF
