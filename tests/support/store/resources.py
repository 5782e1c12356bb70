"""Resources that tests publish, read and point to."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration

from fulmen.store.v1 import resource_pb2
from fulmen.store.v1 import resource_service_pb2 as pb
from tests.support.store.running import Stubs

__all__ = ["publish", "read", "set_alias"]


async def publish(
    stubs: Stubs,
    *names: str,
    expected: dict[str, int] | None = None,
    request_id: str = "",
    ttl_s: float | None = None,
    kind: str = "prompt",
    content: bytes = b"x",
    **fields: Any,
) -> list[resource_pb2.ResourceVersion]:
    """Publishes one version of each named resource in one request."""
    if ttl_s is not None:
        fields["ttl"] = Duration(seconds=int(ttl_s), nanos=round(ttl_s % 1 * 1e9))
    response = await stubs.resources.PublishResources(
        pb.PublishResourcesRequest(
            resources=[
                resource_pb2.ResourceVersion(name=f"resources/{name}", kind=kind, content=content, **fields)
                for name in names
            ],
            expected_latest_versions={f"resources/{name}": number for name, number in (expected or {}).items()},
            request_id=request_id,
        )
    )
    return list(response.resources)


async def read(stubs: Stubs, *names: str) -> list[resource_pb2.ResourceVersion]:
    """Returns versions with content."""
    return list((await stubs.resources.GetResources(pb.GetResourcesRequest(names=names))).resources)


async def set_alias(stubs: Stubs, name: str, alias: str, version: int, *, etag: str = "") -> resource_pb2.ResourceAlias:
    """Points an alias of a resource to a version."""
    request = pb.SetAliasRequest(name=f"resources/{name}/aliases/{alias}", version=version, etag=etag)
    moved: resource_pb2.ResourceAlias = (await stubs.resources.SetAlias(request)).alias
    return moved
