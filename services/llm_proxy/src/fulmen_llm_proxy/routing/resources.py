"""Routes and backends as resources of the store: watched into the routing table, and published."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import structlog

from fulmen.errors import DeadlineExceeded, EtagMismatch, FulmenError, NotFound, ResourceNotFound, Unavailable
from fulmen.ids import uuid7
from fulmen.rpc.channel import FulmenChannel
from fulmen.rpc.resource_contents import read_resources
from fulmen.store.v1 import resource_pb2, resource_service_pb2, resource_service_pb2_grpc
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.codec import (
    BACKEND_KIND,
    CONTENT_TYPE,
    ROUTE_KIND,
    decode_backend,
    decode_route,
    parse_backend,
    parse_route,
)
from fulmen_llm_proxy.routing.retry import RetryPolicy
from fulmen_llm_proxy.routing.table import Backend, Route, RoutingTable
from fulmen_llm_proxy.routing.table_holder import TableHolder

_SILENCE_S = 45.0
"""Three keep-alives of the store; a stream without messages for longer is considered dead."""

_MAX_CHANGES = 8
"""Maximum number of tries of a change that conflicts with other replicas."""

_MAX_REASON = 500
_PAGE_SIZE = 1000
_Read = TypeVar("_Read")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A version of a resource in the store."""

    kind: str
    version: int
    content: bytes
    size_bytes: int

    @property
    def is_removed(self) -> bool:
        """Whether the version has no content, which marks a removed route or backend."""
        return not self.size_bytes


class ResourceCache:
    """The latest versions of all routes and backends, maintained by the watch."""

    def __init__(self) -> None:
        self.documents: Mapping[str, Document] = {}
        self.unreadable: frozenset[str] = frozenset()

    def of_kind(self, kind: str) -> dict[str, Document]:
        """Returns the readable documents of a kind by resource id, sorted by id, without removed ones."""
        return {
            rid: found
            for rid, found in sorted(self.documents.items())
            if found.kind == kind and not found.is_removed and rid not in self.unreadable
        }

    def find(self, resource_id: str) -> Document | None:
        """Returns a document; None if it does not exist, was removed or is unreadable."""
        found = self.documents.get(resource_id)
        return None if found is None or found.is_removed or resource_id in self.unreadable else found


class RoutingWatch:
    """Background role: keeps the routing table in sync with the store.

    While the store is unavailable, the last table stays in use. After a reconnect the stream's snapshot includes missed
    changes.
    """

    def __init__(
        self,
        *,
        channel: FulmenChannel,
        project: str,
        tables: TableHolder,
        resources: ResourceCache,
        states: BackendStates,
        retry: RetryPolicy,
    ) -> None:
        self._stub = resource_service_pb2_grpc.ResourceServiceStub(channel)
        self._project = project
        self._tables = tables
        self._resources = resources
        self._states = states
        self._retry = retry

    async def run(self) -> None:
        """Follows the store until cancelled."""
        delays = self._retry.delays(random.random)
        while True:
            try:
                async for _ in self._follow():
                    delays = self._retry.delays(random.random)
                reason = "closed"
            except FulmenError as error:
                reason = error.reason
            delay_s = next(delays)
            _log.warning("route_watch_lost", reason=reason, retry_in_s=round(delay_s, 3))
            await asyncio.sleep(delay_s)

    async def _follow(self) -> AsyncIterator[None]:
        """Follows one stream to its end; yields after each message."""
        request = resource_service_pb2.WatchResourcesRequest(project=self._project, kinds=[ROUTE_KIND, BACKEND_KIND])
        stream = self._stub.WatchResources(request)
        try:
            documents: dict[str, Document] = {}
            complete = False
            while True:
                try:
                    async with asyncio.timeout(_SILENCE_S):
                        message = await stream.read()
                except TimeoutError:
                    raise Unavailable("The watch stream of the store timed out.") from None
                if not isinstance(message, resource_service_pb2.WatchResourcesResponse):
                    return
                for resource in message.resources:
                    _keep_latest(documents, resource)
                complete |= message.snapshot_complete
                if complete and (message.resources or message.snapshot_complete):
                    self._swap(documents)
                yield
        finally:
            stream.cancel()

    def _swap(self, documents: Mapping[str, Document]) -> None:
        table = build_table(documents, before=self._tables.current)
        self._resources.documents, self._resources.unreadable = dict(documents), table.unreadable
        self._tables.swap(table)
        self._states.keep_only(table.backends)
        _log.info("routing_table_changed", routes=len(table.routes), backends=len(table.backends))


def build_table(documents: Mapping[str, Document], *, before: RoutingTable) -> RoutingTable:
    """Builds a table from documents; an unreadable document leaves its entry as it was."""
    routes: dict[str, Route] = {}
    backends: dict[str, Backend] = {}
    unreadable: set[str] = set()
    for resource_id, document in documents.items():
        key = resource_id.partition(".")[2]
        if document.is_removed:
            continue
        try:
            if document.kind == ROUTE_KIND:
                routes[key] = decode_route(parse_route(document.content))
            else:
                backends[key] = decode_backend(parse_backend(document.content))
        except Exception as error:  # noqa: BLE001  # Whatever is stored must not stop the proxy, now or at its next start.
            _log.error("routing_resource_unreadable", resource=resource_id, reason=str(error)[:_MAX_REASON])
            unreadable.add(resource_id)
            if document.kind == ROUTE_KIND and key in before.routes:
                routes[key] = before.routes[key]
            elif key in before.backends:
                backends[key] = before.backends[key]
    versions = {resource_id: document.version for resource_id, document in documents.items()}
    return RoutingTable(routes=routes, backends=backends, versions=versions, unreadable=frozenset(unreadable))


def _keep_latest(documents: dict[str, Document], resource: resource_pb2.ResourceVersion) -> None:
    resource_id = resource.name.split("/")[1]
    held = documents.get(resource_id)
    if held is None or held.version < resource.version:
        documents[resource_id] = Document(
            kind=resource.kind, version=resource.version, content=resource.content, size_bytes=resource.size_bytes
        )


class ResourceWriter:
    """Publishes routes and backends, and waits until this replica's table has them."""

    def __init__(
        self,
        *,
        channel: FulmenChannel,
        project: str,
        resources: ResourceCache,
        tables: TableHolder,
        deadline_s: float = 10.0,
    ) -> None:
        self._stub = resource_service_pb2_grpc.ResourceServiceStub(channel)
        self._project = project
        self.resources = resources
        self.tables = tables
        self._deadline_s = deadline_s
        self.changing = asyncio.Lock()
        """Held while a change is made, so that each starts from the result of the one before."""

    async def change(self, make: Callable[[], Mapping[str, bytes]]) -> None:
        """Publishes a new version of each route or backend that `make` returns by resource id, atomically.

        `make` starts from this replica's documents. If another replica has changed one meanwhile, nothing is published,
        and `make` is called again with that change; also if it misses one, which another replica may have just published.

        Raises:
            NotFound: if `make` misses one that the store does not have either.
            EtagMismatch: if every try conflicted with another change.
            Unavailable: if the store cannot be reached, or the table does not follow in time.
        """
        for attempt in range(1, _MAX_CHANGES + 1):
            contents = await self.current(make)
            if not contents:
                return
            try:
                await self._await_versions(await self._publish(contents))
            except EtagMismatch as error:
                if attempt == _MAX_CHANGES:
                    raise
                await self._await_versions({error.metadata["resource"]: int(error.metadata["latest_version"])})
            else:
                return

    async def current(self, read: Callable[[], _Read]) -> _Read:
        """Returns what `read` finds in this replica's table; if it misses something, in a table that is as new as the store.

        Raises:
            NotFound: if the store does not have it either.
            Unavailable: if the store cannot be reached, or the table does not follow in time.
        """
        try:
            return read()
        except NotFound:
            await self.refresh()
            return read()

    async def refresh(self) -> None:
        """Waits until this replica's table is as new as the store.

        Raises:
            Unavailable: if the store cannot be reached, or the table does not follow in time.
        """
        await self._await_versions({**await self._stored(BACKEND_KIND), **await self._stored(ROUTE_KIND)})

    async def catch_up(self, resource_id: str) -> None:
        """Waits until this replica's table is as new as the store in one resource; the store may have none.

        Raises:
            Unavailable: if the store has it, and the table does not follow in time.
        """
        request = resource_service_pb2.GetResourcesRequest(names=[f"resources/{resource_id}"], project=self._project)
        try:
            answer = await self._stub.GetResources(request, timeout=self._deadline_s)
        except (ResourceNotFound, Unavailable, DeadlineExceeded):
            return  # While the store is unavailable, the last table stays in use.
        await self._await_versions({resource_id: answer.resources[0].version})

    async def _stored(self, kind: str) -> dict[str, int]:
        """Returns the latest version of every resource of a kind in the store."""
        request = resource_service_pb2.ListResourceVersionsRequest(
            project=self._project, kind=kind, page_size=_PAGE_SIZE
        )
        found: dict[str, int] = {}
        while True:
            answer = await self._stub.ListResourceVersions(request, timeout=self._deadline_s)
            found |= {each.name.split("/")[1]: each.version for each in answer.resources}
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    async def _publish(self, contents: Mapping[str, bytes]) -> dict[str, int]:
        resources = [
            resource_pb2.ResourceVersion(
                name=f"resources/{resource_id}",
                project=self._project,
                kind=resource_id.partition(".")[0],
                content_type=CONTENT_TYPE,
                content=content,
            )
            for resource_id, content in contents.items()
        ]
        held = {resource_id: self.resources.documents.get(resource_id) for resource_id in contents}
        request = resource_service_pb2.PublishResourcesRequest(
            resources=resources,
            request_id=str(uuid7()),
            expected_latest_versions={
                f"resources/{resource_id}": 0 if document is None else document.version
                for resource_id, document in held.items()
            },
        )
        answer = await self._stub.PublishResources(request, timeout=self._deadline_s)
        return {
            resource_id: published.version for resource_id, published in zip(contents, answer.resources, strict=True)
        }

    async def _await_versions(self, versions: Mapping[str, int]) -> None:
        """Waits until this replica's table has these versions or later ones."""
        try:
            async with asyncio.timeout(self._deadline_s):
                for resource_id, version in versions.items():
                    await self.tables.has_version(resource_id, version)
        except TimeoutError:
            raise Unavailable("The change is stored, but this replica has not applied it yet.") from None

    async def content(self, resource_id: str, version: int) -> bytes:
        """Returns the content of one version.

        Raises:
            ResourceNotFound: if the version does not exist.
        """
        name = f"resources/{resource_id}/versions/{version}"
        (found,) = await read_resources(self._stub, [name], project=self._project, timeout=self._deadline_s)
        return bytes(found.content)
