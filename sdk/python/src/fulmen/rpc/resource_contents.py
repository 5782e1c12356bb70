"""Reads versions of resources with their contents, which may be larger than a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fulmen.errors import InternalError
from fulmen.rpc.channel import DEFAULT_TIMEOUT_S
from fulmen.store.v1.resource_pb2 import ResourceVersion
from fulmen.store.v1.resource_service_pb2 import GetResourcesRequest, ReadContentRequest
from fulmen.store.v1.resource_service_pb2_grpc import ResourceServiceStub

__all__ = ["read_resources"]

BATCH: Final = 64


async def read_resources(
    stub: ResourceServiceStub, names: Sequence[str], *, project: str = "", timeout: float = DEFAULT_TIMEOUT_S
) -> list[ResourceVersion]:
    """Returns versions with their whole contents, in the order of the names.

    Args:
        stub: The store's resources.
        names: `resources/{resource}`, or names of versions or aliases.
        project: `projects/{project}`; empty for the token's.
        timeout: Limit of each call, seconds.

    Raises:
        ResourceNotFound: if one does not exist.
    """
    found: list[ResourceVersion] = []
    for start in range(0, len(names), BATCH):
        request = GetResourcesRequest(names=names[start : start + BATCH], project=project)
        found += (await stub.GetResources(request, timeout=timeout)).resources
    for version in found:
        parts = [version.content]
        missing_bytes = version.size_bytes - len(version.content)
        while missing_bytes > 0:
            part = ReadContentRequest(
                name=version.name, project=project, offset_bytes=version.size_bytes - missing_bytes
            )
            parts.append((await stub.ReadContent(part, timeout=timeout)).content)
            missing_bytes -= len(parts[-1])
            if not parts[-1]:
                raise InternalError(
                    "The content of the version is shorter than its declared size.", resource=version.name
                )
        version.content = b"".join(parts)
    return found
