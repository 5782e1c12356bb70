"""The services of the store that the proxy uses, in memory, on a real gRPC socket.

It keeps to the contracts of `fulmen.store.v1` where the proxy can see them: versions grow by one, a
watch begins with a snapshot, chunks are acknowledged in order and repeats are dropped. Attempts run in train mode, in
the default project, unless a test says otherwise in `standings`: nobody has to lease them first.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import zstandard
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.errors import EtagMismatch, ResourceNotFound
from fulmen.ids import DEFAULT_PROJECT, parse_attempt_name
from fulmen.rpc.status import STATUS_METADATA_KEY, encode
from fulmen.store.v1 import (
    attempt_pb2,
    lease_service_pb2,
    lease_service_pb2_grpc,
    project_service_pb2_grpc,
    proxy_service_pb2,
    proxy_service_pb2_grpc,
    resource_pb2,
    resource_service_pb2,
    resource_service_pb2_grpc,
    rollout_pb2,
    span_pb2,
    span_service_pb2,
    span_service_pb2_grpc,
)
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.service_kit.key_store import KeyService

SIGNING_KEY = "tests-only-signing-key-of-32-bytes-or-more"
_QUESTIONS_KEPT = 100
_SLOW_S = 0.5
LOST_S = 10.0


class FakeStore:
    """What the store holds; survives `stop` and `start`, as a database would."""

    def __init__(self, *, signing_key: str = SIGNING_KEY) -> None:
        self.port = 0
        self.keys = KeyService(signing_key)
        self.versions: dict[str, list[resource_pb2.ResourceVersion]] = {}
        self.chunks: dict[str, span_pb2.SpanChunk] = {}
        self.appended = asyncio.Semaphore(0)
        """Released once for each new chunk."""
        self.repeats = 0
        self.acknowledge = asyncio.Event()
        """Chunks are taken, and acknowledged, only while it is set."""
        self.acknowledge.set()
        self.reject_with = ""
        self.standings: dict[str, lease_service_pb2.AttemptCheckResult] = {}
        """How attempts stand of which a test has said so; the others run."""
        self.checks: deque[list[str]] = deque(maxlen=_QUESTIONS_KEPT)
        """The attempts of each question, as the proxy asked; the last ones."""
        self.proxies: dict[str, float] = {}
        """When each that has not left called last."""
        self.accounts: dict[str, dict[str, proxy_service_pb2.CaptureAccount]] = {}
        """The accounts of attempts, by proxy."""
        self._asked = asyncio.Event()
        self.faster: list[resource_pb2.ResourceVersion] = []
        """What other replicas publish just before the next publication."""
        self.watchers: set[asyncio.Queue[resource_pb2.ResourceVersion]] = set()
        self.slow: set[asyncio.Queue[resource_pb2.ResourceVersion]] = set()
        """Watchers that are told half a second later."""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> FakeStore:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def target(self) -> str:
        """Its address."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens, on the same port as before if it ran already."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        resource_service_pb2_grpc.add_ResourceServiceServicer_to_server(_Resources(self), self._server)
        span_service_pb2_grpc.add_SpanServiceServicer_to_server(_Spans(self), self._server)
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(_Leases(self), self._server)
        project_service_pb2_grpc.add_ProjectServiceServicer_to_server(self.keys, self._server)
        proxy_service_pb2_grpc.add_ProxyServiceServicer_to_server(_Proxies(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Closes the socket and every stream."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace=None)

    def spans(self, attempt: str) -> list[tuple[Span, ModelCallRecord | None]]:
        """Returns the spans of an attempt in order of start, with their records."""
        found = []
        for chunk in self.chunks.values():
            if chunk.attempt == attempt:
                for record in batch_of(chunk).spans:
                    call = ModelCallRecord.FromString(record.model_call) if record.model_call else None
                    found.append((Span.FromString(record.otlp_span), call))
        return sorted(found, key=lambda pair: pair[0].start_time_unix_nano)

    def record(self, attempt: str) -> ModelCallRecord:
        """Returns the record of an attempt's only call."""
        [(_, record)] = self.spans(attempt)
        assert record is not None
        return record

    def stands(
        self, attempt: str, status: lease_service_pb2.AttemptStatus, *, project: str = DEFAULT_PROJECT, **fields: Any
    ) -> None:
        """Says how an attempt stands from now on."""
        usual = {"state": attempt_pb2.ATTEMPT_STATE_RUNNING, "mode": rollout_pb2.ROLLOUT_MODE_TRAIN}
        self.standings[attempt] = lease_service_pb2.AttemptCheckResult(
            attempt=attempt, status=status, project=project, **{**usual, **fields}
        )

    def asked(self, attempts: list[str]) -> None:
        """Notes a question."""
        self.checks.append(attempts)
        self._asked.set()

    async def next_question(self) -> list[str]:
        """Returns the attempts of the next question; the caller gives the deadline."""
        self._asked.clear()
        await self._asked.wait()
        return self.checks[-1]

    def publish(self, resource: resource_pb2.ResourceVersion) -> resource_pb2.ResourceVersion:
        """Adds a version and tells the watchers."""
        resource_id = resource.name.split("/")[1]
        held = self.versions.setdefault(resource_id, [])
        stored = resource_pb2.ResourceVersion()
        stored.CopyFrom(resource)
        stored.version = len(held) + 1
        stored.size_bytes = len(resource.content)
        stored.name = f"resources/{resource_id}/versions/{stored.version}"
        held.append(stored)
        for watcher in self.watchers:
            if watcher in self.slow:
                asyncio.get_running_loop().call_later(_SLOW_S, watcher.put_nowait, stored)
            else:
                watcher.put_nowait(stored)
        return stored


def batch_of(chunk: span_pb2.SpanChunk) -> span_pb2.SpanBatch:
    """Unpacks a chunk."""
    payload = chunk.payload
    if chunk.codec == span_pb2.SPAN_CODEC_ZSTD:
        payload = zstandard.ZstdDecompressor().decompress(payload)
    return span_pb2.SpanBatch.FromString(payload)


class _Resources(resource_service_pb2_grpc.ResourceServiceServicer):
    def __init__(self, store: FakeStore) -> None:
        self._store = store

    async def PublishResources(
        self, request: resource_service_pb2.PublishResourcesRequest, context: grpc.aio.ServicerContext
    ) -> resource_service_pb2.PublishResourcesResponse:
        while self._store.faster:
            self._store.publish(self._store.faster.pop(0))
        for name, expected in request.expected_latest_versions.items():
            resource_id = name.split("/")[1]
            latest = len(self._store.versions.get(resource_id, []))
            if latest != expected:
                mismatch = EtagMismatch("Somebody was faster.", resource=resource_id, latest_version=latest)
                status = encode(mismatch)
                details = ((STATUS_METADATA_KEY, status.SerializeToString()),)
                await context.abort(grpc.StatusCode.ABORTED, status.message, details)
        published = [self._store.publish(resource) for resource in request.resources]
        return resource_service_pb2.PublishResourcesResponse(resources=published)

    async def GetResources(
        self, request: resource_service_pb2.GetResourcesRequest, context: grpc.aio.ServicerContext
    ) -> resource_service_pb2.GetResourcesResponse:
        found = []
        for name in request.names:
            _, resource_id, *version = name.split("/")
            held = self._store.versions.get(resource_id, [])
            number = int(version[1]) if version else len(held)
            if not 1 <= number <= len(held):
                status = encode(ResourceNotFound(f"There is no {name}.", resource=name))
                details = ((STATUS_METADATA_KEY, status.SerializeToString()),)
                await context.abort(grpc.StatusCode.NOT_FOUND, status.message, details)
            found.append(held[number - 1])
        return resource_service_pb2.GetResourcesResponse(resources=found)

    async def ListResourceVersions(
        self, request: resource_service_pb2.ListResourceVersionsRequest, _: grpc.aio.ServicerContext
    ) -> resource_service_pb2.ListResourceVersionsResponse:
        latest = [held[-1] for held in self._store.versions.values() if held[-1].kind == request.kind]
        listed = [resource_pb2.ResourceVersion(name=each.name, kind=each.kind, version=each.version) for each in latest]
        return resource_service_pb2.ListResourceVersionsResponse(resources=listed)

    async def WatchResources(
        self, request: resource_service_pb2.WatchResourcesRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[resource_service_pb2.WatchResourcesResponse]:
        news: asyncio.Queue[resource_pb2.ResourceVersion] = asyncio.Queue()
        self._store.watchers.add(news)
        try:
            latest = [held[-1] for held in self._store.versions.values()]
            chosen = [resource for resource in latest if resource.kind in request.kinds]
            yield resource_service_pb2.WatchResourcesResponse(resources=chosen, snapshot_complete=True)
            while True:
                resource = await news.get()
                if resource.kind in request.kinds:
                    yield resource_service_pb2.WatchResourcesResponse(resources=[resource])
        finally:
            self._store.watchers.discard(news)


class _Leases(lease_service_pb2_grpc.LeaseServiceServicer):
    def __init__(self, store: FakeStore) -> None:
        self._store = store

    async def CheckAttempts(
        self, request: lease_service_pb2.CheckAttemptsRequest, _: grpc.aio.ServicerContext
    ) -> lease_service_pb2.CheckAttemptsResponse:
        self._store.asked([check.attempt for check in request.attempts])
        standings = [self._standing(check) for check in request.attempts]
        return lease_service_pb2.CheckAttemptsResponse(results=standings)

    def _standing(self, check: lease_service_pb2.AttemptCheck) -> lease_service_pb2.AttemptCheckResult:
        known = self._store.standings.get(check.attempt)
        if known is not None:
            return known
        number = parse_attempt_name(check.attempt).number
        fresh = check.epoch in (0, number)
        return lease_service_pb2.AttemptCheckResult(
            attempt=check.attempt,
            status=lease_service_pb2.ATTEMPT_STATUS_LIVE if fresh else lease_service_pb2.ATTEMPT_STATUS_STALE_EPOCH,
            state=attempt_pb2.ATTEMPT_STATE_RUNNING,
            project=DEFAULT_PROJECT,
            mode=rollout_pb2.ROLLOUT_MODE_TRAIN,
            current_epoch=number,
        )


class _Proxies(proxy_service_pb2_grpc.ProxyServiceServicer):
    def __init__(self, store: FakeStore) -> None:
        self._store = store

    async def SyncProxy(
        self, request: proxy_service_pb2.SyncProxyRequest, _: grpc.aio.ServicerContext
    ) -> proxy_service_pb2.SyncProxyResponse:
        held = self._store.accounts.setdefault(request.instance_id, {})
        held.update({account.attempt: account for account in request.accounts})
        proxies = self._store.proxies
        proxies[request.instance_id] = time.monotonic()
        if request.leaving:
            del proxies[request.instance_id]
        live = [each for each in proxies if self._is_live(each) and each != request.instance_id]
        response = proxy_service_pb2.SyncProxyResponse(other_count=len(live))
        response.store_time.GetCurrentTime()
        return response

    async def GetCaptureTotals(
        self, request: proxy_service_pb2.GetCaptureTotalsRequest, _: grpc.aio.ServicerContext
    ) -> proxy_service_pb2.GetCaptureTotalsResponse:
        others = [each for each in self._store.accounts.items() if each[0] != request.except_instance_id]
        totals = []
        for attempt in request.attempts:
            found = [accounts[attempt] for _, accounts in others if attempt in accounts]
            open_at = [proxy for proxy, accounts in others if attempt in accounts and accounts[attempt].open]
            total = proxy_service_pb2.CaptureAccount(attempt=attempt, open=any(map(self._is_live, open_at)))
            for field in total.DESCRIPTOR.fields[2:]:
                setattr(total, field.name, sum(getattr(each, field.name) for each in found))
            lost = not all(map(self._is_live, open_at))
            totals.append(proxy_service_pb2.CaptureTotals(sum=total, lost=lost))
        return proxy_service_pb2.GetCaptureTotalsResponse(totals=totals)

    def _is_live(self, proxy: str) -> bool:
        return time.monotonic() - self._store.proxies.get(proxy, -LOST_S) < LOST_S


class _Spans(span_service_pb2_grpc.SpanServiceServicer):
    def __init__(self, store: FakeStore) -> None:
        self._store = store

    async def StreamSpans(
        self, request: span_service_pb2.StreamSpansRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[span_service_pb2.StreamSpansResponse]:
        for parent in request.parents:
            chunks = [chunk for chunk in self._store.chunks.values() if chunk.attempt == parent]
            yield span_service_pb2.StreamSpansResponse(chunks=chunks)

    async def AppendSpans(
        self, requests: AsyncIterator[span_service_pb2.AppendSpansRequest], _: grpc.aio.ServicerContext
    ) -> AsyncIterator[span_service_pb2.AppendSpansResponse]:
        store = self._store
        async for request in requests:
            await store.acknowledge.wait()
            answer = span_service_pb2.AppendSpansResponse()
            for chunk in request.chunks:
                if store.reject_with:
                    answer.rejected.add(chunk_id=chunk.chunk_id, message=store.reject_with)
                    continue
                if chunk.chunk_id in store.chunks:
                    store.repeats += 1
                else:
                    store.chunks[chunk.chunk_id] = chunk
                    store.appended.release()
                answer.accepted_count += 1
            yield answer
