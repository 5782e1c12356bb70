"""`ResourceService` over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.errors import ArgumentInvalid, Draining, PermissionDenied, Violation
from fulmen.store.v1 import resource_pb2, resource_service_pb2_grpc
from fulmen.store.v1 import resource_service_pb2 as pb
from fulmen_service_kit.rpc.message_sizes import ANSWER_BYTES, fitting
from fulmen_service_kit.security.auth import current_caller, require_project
from fulmen_service_kit.security.permissions import kind_action, require
from fulmen_store.malformed import malformed
from fulmen_store.metrics import StoreMetrics
from fulmen_store.resources.diff import compare
from fulmen_store.resources.resources import Resources
from fulmen_store.resources.table import ResourceTable
from fulmen_store.resources.versions import MAX_CONTENT_BYTES, Alias, NewVersion, Publication, Version, parse_ref
from fulmen_store.resources.watch import Changes, ResourceWatcher
from fulmen_store.resources.watch_cursor import WatchSelection
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.transport.access import require_count, require_range, run_fence
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size

__all__ = ["ResourceService"]

MAX_NAMES = 64
DEFAULT_PAGE = 50
HIGHEST_NUMBER = 2**62
HIGHEST_RESOURCE = 2**31 - 1
KEY_BYTES = 8
# What GetResources is filled to, with versions that have everything but content.
MOST_BYTES = 4 * 1024 * 1024 - 64 * 1024
VERSION_BYTES = 44 * 1024


class ResourceService(resource_service_pb2_grpc.ResourceServiceServicer):
    """Serves versioned resources."""

    def __init__(
        self,
        *,
        resources: Resources,
        watcher: ResourceWatcher,
        table: ResourceTable,
        rollouts: RolloutTable,
        metrics: StoreMetrics,
        stopping: asyncio.Event,
    ) -> None:
        """Creates the servicer; `stopping` is set when the replica shuts down."""
        self._metrics = metrics
        self._resources = resources
        self._watcher = watcher
        self._table = table
        self._rollouts = rollouts
        self._stopping = stopping

    async def PublishResources(
        self, request: pb.PublishResourcesRequest, context: grpc.aio.ServicerContext
    ) -> pb.PublishResourcesResponse:
        """Publishes versions, all or none."""
        projects = {message.project or current_caller().own_project for message in request.resources} or {""}
        if len(projects) > 1:
            problem = Violation(field="resources", description="belong to different projects")
            raise ArgumentInvalid("The resources cannot be published.", violations=[problem])
        project = require_project(projects.pop())
        with self._counted([message.kind for message in request.resources]):
            published = await self._publish(request, project)
        return pb.PublishResourcesResponse(
            resources=[_message(version, project, with_content=False) for version in published]
        )

    async def _publish(self, request: pb.PublishResourcesRequest, project: str) -> Sequence[Version]:
        for kind in {message.kind for message in request.resources}:
            require(current_caller(), kind_action(kind), project)
        publication = Publication(
            versions=[_new(message) for message in request.resources],
            request_id=request.request_id,
            expected={_id(name): number for name, number in request.expected_latest_versions.items()},
            fence=run_fence(request),
        )
        project_id = await self._rollouts.project_id(project)
        return await self._resources.publish(project_id, publication)

    @contextlib.contextmanager
    def _counted(self, kinds: Sequence[str]) -> Iterator[None]:
        """Counts a publication by its result; one that fails for another reason is not counted."""
        result = ""
        try:
            yield
            result = "accepted"
        except PermissionDenied:
            result = "denied"
            raise
        except ArgumentInvalid:
            result = "malformed"
            raise
        finally:
            for kind in kinds if result else ():
                self._metrics.published(kind, current_caller().role, result)

    async def GetResources(
        self, request: pb.GetResourcesRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetResourcesResponse:
        """Returns versions with their content."""
        require_count(request.names, field="names", maximum=MAX_NAMES)
        project = require_project(request.project)
        refs = [(name, parse_ref(name, field="names")) for name in request.names]
        project_id = await self._rollouts.project_id(project)
        response = pb.GetResourcesResponse()
        room_bytes = min(ANSWER_BYTES, MOST_BYTES - len(refs) * VERSION_BYTES)
        for name, ref in refs:
            version = await self._table.get(project_id, name, ref, max_bytes=room_bytes)
            response.resources.append(_message(version, project))
            room_bytes -= len(version.content)
        return response

    async def ReadContent(
        self, request: pb.ReadContentRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReadContentResponse:
        """Returns a part of the content of a version."""
        project = require_project(request.project)
        ref = parse_ref(request.name, field="name")
        if ref.version is None:
            raise malformed("name", "is not of the form resources/{id}/versions/{n}")
        require_range("offset_bytes", request.offset_bytes, 0, MAX_CONTENT_BYTES)
        project_id = await self._rollouts.project_id(project)
        content = await self._table.content_part(
            project_id, request.name, ref, offset=request.offset_bytes, limit=ANSWER_BYTES
        )
        return pb.ReadContentResponse(content=content)

    async def ListResourceVersions(
        self, request: pb.ListResourceVersionsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListResourceVersionsResponse:
        """Lists the versions of a resource, or the latest version of every resource."""
        project = require_project(request.project)
        project_id = await self._rollouts.project_id(project)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        listed = f"resources/{project}/{request.parent}/{request.kind}"
        last = decode_token(request.page_token, listed=listed, key_bytes=KEY_BYTES)
        kind = request.kind or None
        aliases: list[Alias] = []
        if request.parent:
            resource = parse_ref(request.parent, field="parent").resource
            below = HIGHEST_NUMBER if last is None else int.from_bytes(last)
            found = await self._table.versions_of(project_id, resource, kind=kind, below=below, limit=limit + 1)
            aliases = await self._table.aliases_of(project_id, resource)
        else:
            below = HIGHEST_RESOURCE if last is None else int.from_bytes(last)
            found = await self._table.latest_of_all(project_id, kind=kind, below=below, limit=limit + 1)
        shown = fitting(_message(version, project, with_content=False) for version in found[:limit])
        token = ""
        if len(found) > len(shown):
            end = found[len(shown) - 1]
            token = encode_token(
                (end.version if request.parent else end.resource_id).to_bytes(KEY_BYTES), listed=listed
            )
        return pb.ListResourceVersionsResponse(
            resources=shown,
            next_page_token=token,
            aliases=[_alias_message(alias) for alias in aliases],
        )

    async def DiffResources(
        self, request: pb.DiffResourcesRequest, context: grpc.aio.ServicerContext
    ) -> pb.DiffResourcesResponse:
        """Compares two versions."""
        project = require_project(request.project)
        refs = [parse_ref(request.base, field="base"), parse_ref(request.target, field="target")]
        project_id = await self._rollouts.project_id(project)
        base = await self._table.get(project_id, request.base, refs[0])
        target = await self._table.get(project_id, request.target, refs[1])
        # In a thread, because comparing contents of a few MiB would block other callers.
        found = await asyncio.to_thread(
            compare,
            base.content,
            target.content,
            base_name=_name(base),
            target_name=_name(target),
            is_json=all("json" in version.content_type.lower() for version in (base, target)),
        )
        return pb.DiffResourcesResponse(
            unified_diff=found.unified_diff,
            base=_message(base, project, with_content=False),
            target=_message(target, project, with_content=False),
            equal=base.sha256 == target.sha256,
            truncated=found.truncated,
        )

    async def SetAlias(self, request: pb.SetAliasRequest, context: grpc.aio.ServicerContext) -> pb.SetAliasResponse:
        """Points an alias to a version."""
        project = require_project(request.project)
        resource = parse_ref(request.name, field="name").resource
        project_id = await self._rollouts.project_id(project)
        newest = await self._table.versions_of(project_id, resource, kind=None, below=HIGHEST_NUMBER, limit=1)
        kinds = [version.kind for version in newest]
        with self._counted(kinds):
            for kind in kinds:
                require(current_caller(), kind_action(kind), project)
            alias = await self._resources.set_alias(
                project_id, request.name, request.version, etag=request.etag, fence=run_fence(request)
            )
        return pb.SetAliasResponse(alias=_alias_message(alias))

    async def WatchResources(
        self, request: pb.WatchResourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchResourcesResponse]:
        """Streams the snapshot, then changes; with a cursor, only the changes after it."""
        project = require_project(request.project)
        selection = WatchSelection(
            project_id=await self._rollouts.project_id(project),
            kinds=tuple(request.kinds),
            id_prefix=request.id_prefix,
        )
        async for changes in self._watcher.follow(selection, request.cursor, stopping=self._stopping.is_set):
            yield _changes(changes, project)
        raise Draining("The store is shutting down: open the stream again from the last cursor.")


def _id(name: str) -> str:
    """Returns the id in a resource's name; for a malformed name, an id that no resource has."""
    return name.removeprefix("resources/") if name.startswith("resources/") else f"/{name}"


def _new(message: resource_pb2.ResourceVersion) -> NewVersion:
    return NewVersion(
        resource=_id(message.name),
        kind=message.kind,
        content_type=message.content_type,
        content=message.content,
        parent=message.parent,
        metadata=dict(message.metadata),
        dependencies=tuple(message.dependencies),
        ttl_s=message.ttl.seconds + message.ttl.nanos / 1e9 if message.HasField("ttl") else None,
    )


def _name(version: Version) -> str:
    return f"resources/{version.resource}/versions/{version.version}"


def _message(version: Version, project: str, *, with_content: bool = True) -> resource_pb2.ResourceVersion:
    message = resource_pb2.ResourceVersion(
        name=_name(version),
        version=version.version,
        project=project,
        kind=version.kind,
        content_type=version.content_type,
        content=version.content if with_content else b"",
        sha256=version.sha256,
        size_bytes=version.size_bytes,
        parent=version.parent,
        metadata=version.metadata,
        dependencies=version.dependencies,
    )
    if version.ttl_s is not None and version.expires_at is not None:
        message.ttl.FromMilliseconds(round(version.ttl_s * 1000))
        message.expire_time.FromDatetime(version.expires_at)
    message.create_time.FromDatetime(version.created_at)
    return message


def _alias_message(alias: Alias) -> resource_pb2.ResourceAlias:
    moved = Timestamp()
    moved.FromDatetime(alias.updated_at)
    return resource_pb2.ResourceAlias(
        name=f"resources/{alias.resource}/aliases/{alias.alias}",
        version=alias.version,
        etag=str(alias.revision),
        update_time=moved,
    )


def _changes(changes: Changes, project: str) -> pb.WatchResourcesResponse:
    return pb.WatchResourcesResponse(
        resources=[_message(version, project) for version in changes.versions],
        aliases=[_alias_message(alias) for alias in changes.aliases],
        snapshot_complete=changes.snapshot_complete,
        cursor=changes.cursor,
    )
