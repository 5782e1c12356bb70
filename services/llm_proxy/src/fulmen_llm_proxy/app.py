"""The composition root: everything the proxy consists of."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from prometheus_client import REGISTRY, CollectorRegistry

from fulmen.llm_proxy.v1 import (
    backend_service_pb2_grpc,
    capture_service_pb2_grpc,
    completion_service_pb2_grpc,
    route_service_pb2_grpc,
)
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_llm_proxy.attempts.book import AttemptBook
from fulmen_llm_proxy.attempts.guard import AttemptGuard
from fulmen_llm_proxy.attempts.watch import AttemptChecks, AttemptWatch
from fulmen_llm_proxy.backend_parts import BackendParts, new_states, wire_backends
from fulmen_llm_proxy.calls.body_room import BodyRoom
from fulmen_llm_proxy.calls.gate import Gate
from fulmen_llm_proxy.calls.pipeline import CallPipeline
from fulmen_llm_proxy.calls.response_ids import ResponseIds, ResponseKeeper
from fulmen_llm_proxy.calls.traces import CallTraces
from fulmen_llm_proxy.capture.delivery import CaptureDelivery
from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.capture.queue import CaptureQueue
from fulmen_llm_proxy.capture.shipper import SpanShipper
from fulmen_llm_proxy.capture.span_codec import SpanCodec
from fulmen_llm_proxy.capture.spool import DiskSpool
from fulmen_llm_proxy.meter_parts import MeterParts, wire_meter
from fulmen_llm_proxy.metrics.service import Metrics
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.resources import ResourceBook, ResourceWriter, RoutingWatch
from fulmen_llm_proxy.routing.retry import RetryPolicy
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_llm_proxy.spool_parts import open_spool
from fulmen_llm_proxy.transport.backend_servicer import BackendServicer
from fulmen_llm_proxy.transport.capture_servicer import CaptureServicer
from fulmen_llm_proxy.transport.completion_servicer import CompletionServicer
from fulmen_llm_proxy.transport.http.auth import HttpAuthenticator
from fulmen_llm_proxy.transport.http.http_app import Door
from fulmen_llm_proxy.transport.http.kept_responses import KeptResponses
from fulmen_llm_proxy.transport.http.metrics_page import MetricsPage
from fulmen_llm_proxy.transport.route_servicer import RouteServicer
from fulmen_llm_proxy.workers.siblings import Siblings, WorkerSockets, sockets_of
from fulmen_service_kit.auth import RolePolicy
from fulmen_service_kit.failed_keys import FailedKeys
from fulmen_service_kit.http_server import ANSWERS_SHARE, HttpServer, bind, bind_private
from fulmen_service_kit.lifecycle import Role as BackgroundRole
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.own_traces import own_traces
from fulmen_service_kit.revocation import RevocationFollower, RevokedTokens, revoked_at_store
from fulmen_service_kit.server import RpcServer, build_server
from fulmen_service_kit.settings import ServiceSettings
from fulmen_service_kit.tokens import Role, TokenVerifier

_PACKAGE = "fulmen.llm_proxy.v1"
_SERVICES = tuple(
    f"{_PACKAGE}.{name}" for name in ("RouteService", "BackendService", "CaptureService", "CompletionService")
)
POLICY = RolePolicy(
    services={
        f"{_PACKAGE}.RouteService": frozenset({Role.SERVICE}),
        f"{_PACKAGE}.BackendService": frozenset({Role.SERVICE}),
        f"{_PACKAGE}.CaptureService": frozenset({Role.RUNNER, Role.SERVICE}),
        f"{_PACKAGE}.CompletionService": frozenset({Role.CLIENT, Role.SERVICE, Role.ATTEMPT}),
    },
    rpcs={},
    audited={
        f"/{_PACKAGE}.{rpc}": fields
        for rpc, fields in (
            ("BackendService/RegisterBackend", ("backend.name",)),
            ("BackendService/DrainBackend", ("name",)),
            ("BackendService/ResumeBackend", ("name",)),
            ("BackendService/DeleteBackend", ("name",)),
            ("RouteService/PutRoute", ("route.name",)),
            ("RouteService/PromoteVersion", ("policy", "policy_version")),
            ("RouteService/SplitTraffic", ("name", "weights", "version_weights")),
            ("RouteService/RollbackRoute", ("name", "version")),
            ("RouteService/DeleteRoute", ("name",)),
        )
    },
)
_STORE_RETRY = RetryPolicy(deadline_s=float("inf"), first_delay_s=0.05, max_delay_s=0.5)
"""The store is tried again without end, often enough to follow within a second of its return."""


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Makes the proxy; what must be closed goes on the stack.

    Raises:
        StartupError: if a port cannot be bound.
    """
    if not isinstance(settings, LlmProxySettings):
        raise TypeError("the proxy is built from LlmProxySettings")
    return await build_proxy(settings, stack, registry=REGISTRY)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the data plane, the control plane and the roles work on together."""

    instance_id: str
    channel: FulmenChannel
    metrics: Metrics
    tables: TableHolder
    book: ResourceBook
    states: BackendStates
    ledger: AttemptLedger
    guard: AttemptGuard
    queue: CaptureQueue
    spool: DiskSpool | None
    revoked: RevokedTokens
    verifier: TokenVerifier
    response_ids: ResponseIds
    meter: MeterParts
    backends: BackendParts
    room: BodyRoom
    siblings: Siblings | None
    sockets: WorkerSockets | None


async def build_proxy(
    settings: LlmProxySettings, stack: AsyncExitStack, *, registry: CollectorRegistry
) -> ServiceParts:
    """Makes the proxy with its metrics in the given registry."""
    channel = open_channel(settings.store_target, token=settings.secret("token"), tls=settings.peer_tls())
    stack.push_async_callback(channel.close)
    instance_id, metrics = uuid.uuid4().hex, Metrics(registry)
    keys, revoked = settings.signing_keys(), RevokedTokens()
    siblings, sockets = await _workers(settings, stack)
    ledger = AttemptLedger(keep_s=settings.summary_keep_s, clock=time.monotonic)
    tables, states = TableHolder(), new_states(settings)
    shared = _Shared(
        instance_id=instance_id,
        channel=channel,
        metrics=metrics,
        tables=tables,
        book=ResourceBook(),
        states=states,
        ledger=ledger,
        guard=AttemptGuard(clock=time.time),
        spool=await open_spool(settings, instance_id, ledger, metrics, stack),
        queue=CaptureQueue(max_bytes=settings.capture_buffer_bytes),
        revoked=revoked,
        verifier=TokenVerifier(keys, revoked=revoked),
        response_ids=ResponseIds(keys.accepted),
        meter=wire_meter(settings, channel, instance_id, registry),
        backends=wire_backends(settings, tables=tables, states=states, registry=registry, stack=stack),
        room=BodyRoom(max(settings.request_buffer_bytes, settings.max_request_bytes)),
        siblings=siblings,
        sockets=sockets,
    )
    calls = _call_pipeline(settings, shared)
    http = _http_server(settings, shared, calls, stack)
    draining = asyncio.Event()
    completions = CompletionServicer(
        calls=calls,
        draining=draining,
        room=shared.room,
        max_request_bytes=settings.max_request_bytes,
        max_event_bytes=settings.max_answer_bytes,
        write_timeout_s=settings.write_timeout_s,
    )

    async def drain() -> None:
        draining.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(http.drain(), name="drain-http")
            group.create_task(completions.drain(settings.drain_grace_s * ANSWERS_SHARE), name="drain-rpcs")
        await shared.queue.emptied()
        await shared.meter.exchange.told()

    return ServiceParts(
        server=_rpc_server(settings, shared, completions, draining),
        roles={**_roles(settings, shared), "http-server": http},
        drain=drain,
        ports={"http_port": http.port},
        serve_metrics=False,
    )


async def _workers(
    settings: LlmProxySettings, stack: AsyncExitStack
) -> tuple[Siblings, WorkerSockets] | tuple[None, None]:
    """Returns the way to the other workers and this one's own sockets; nothing for a proxy of one process."""
    if not settings.workers_dir:
        return None, None
    folder = Path(settings.workers_dir)
    siblings = await Siblings.open(
        folder,
        own_index=settings.worker_index,
        count=settings.workers,
        token=settings.secret("token"),
        is_tls=settings.own_tls() is not None,
        stack=stack,
    )
    return siblings, sockets_of(folder, settings.worker_index)


def _call_pipeline(settings: LlmProxySettings, shared: _Shared) -> CallPipeline:
    traces = own_traces()
    return CallPipeline(
        tables=shared.tables,
        sender=shared.backends.sender,
        memory=shared.backends.memory,
        keeper=ResponseKeeper(shared.response_ids),
        states=shared.states,
        ledger=shared.ledger,
        queue=shared.queue,
        gate=Gate(
            tables=shared.tables,
            queue=shared.queue,
            guard=shared.guard,
            meter=shared.meter.meter,
            max_in_flight=settings.max_in_flight,
        ),
        guard=shared.guard,
        metrics=shared.metrics,
        max_event_bytes=settings.max_answer_bytes,
        traced=None if traces is None else CallTraces(traces).ended,
    )


def _http_server(settings: LlmProxySettings, shared: _Shared, calls: CallPipeline, stack: AsyncExitStack) -> HttpServer:
    authenticator = HttpAuthenticator(
        verifier=shared.verifier,
        failed_keys=FailedKeys(per_minute=settings.auth_failures_per_minute, clock=time.monotonic),
        metrics=shared.metrics,
        dev_mode=settings.dev_mode,
    )
    door = Door(
        authenticator=authenticator,
        attempts=AttemptBook(AttemptChecks(shared.channel)),
        calls=calls,
        kept=KeptResponses(ids=shared.response_ids, client=shared.backends.kept, tables=shared.tables),
        guard=shared.guard,
        tables=shared.tables,
        metrics=MetricsPage(
            registry=shared.metrics.registry, siblings=shared.siblings, worker_index=settings.worker_index
        ),
        room=shared.room,
        max_request_bytes=settings.max_request_bytes,
        request_timeout_s=settings.request_timeout_s,
    )
    http = HttpServer(
        door=door,
        listener=bind(settings.host, settings.http_port, shared=shared.sockets is not None),
        private=None if shared.sockets is None else bind_private(shared.sockets.http),
        grace_s=settings.drain_grace_s,
        tls=settings.own_tls(),
        write_timeout_s=settings.write_timeout_s,
    )
    stack.callback(http.close)
    return http


def _rpc_server(
    settings: LlmProxySettings, shared: _Shared, completions: CompletionServicer, draining: asyncio.Event
) -> RpcServer:
    writer = ResourceWriter(channel=shared.channel, project=settings.project, book=shared.book, tables=shared.tables)
    changing = asyncio.Lock()
    routes = RouteServicer(book=shared.book, tables=shared.tables, writer=writer, changing=changing, draining=draining)
    backends = BackendServicer(
        book=shared.book,
        tables=shared.tables,
        writer=writer,
        states=shared.states,
        changing=changing,
        instance_id=shared.instance_id,
        wall_clock=time.time,
        siblings=shared.siblings,
    )
    captures = CaptureServicer(
        ledger=shared.ledger, queue=shared.queue, instance_id=shared.instance_id, siblings=shared.siblings
    )

    def register(server: grpc.aio.Server) -> None:
        route_service_pb2_grpc.add_RouteServiceServicer_to_server(routes, server)
        backend_service_pb2_grpc.add_BackendServiceServicer_to_server(backends, server)
        capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(captures, server)
        completion_service_pb2_grpc.add_CompletionServiceServicer_to_server(completions, server)

    server = build_server(
        settings,
        verifier=shared.verifier,
        policy=POLICY,
        service_names=_SERVICES,
        register=register,
        log_error_texts=False,
        private=None if shared.sockets is None else shared.sockets.rpc,
    )
    server.readiness.add("routes", lambda: "" if shared.tables.is_loaded else "none heard from the store yet")
    return server


def _roles(settings: LlmProxySettings, shared: _Shared) -> dict[str, BackgroundRole]:
    watch = RoutingWatch(
        channel=shared.channel,
        project=settings.project,
        tables=shared.tables,
        book=shared.book,
        states=shared.states,
        retry=_STORE_RETRY,
    )
    delivery = CaptureDelivery(
        queue=shared.queue,
        ledger=shared.ledger,
        sender=SpanShipper(
            channel=shared.channel, codec=SpanCodec(instance_id=shared.instance_id, prices=shared.meter.prices)
        ),
        spool=shared.spool,
        retry=_STORE_RETRY,
        metrics=shared.metrics,
    )
    attempts = AttemptWatch(guard=shared.guard, checks=AttemptChecks(shared.channel), metrics=shared.metrics)
    revocations = RevocationFollower(revoked=shared.revoked, fetch=revoked_at_store(shared.channel))
    return {
        "route-watch": watch,
        "capture-delivery": delivery,
        "revocations": revocations,
        "attempt-watch": attempts,
        "usage-exchange": shared.meter.exchange,
        "health-probe": shared.backends.probe,
    }
