"""Wires the proxy: the one file that knows all parts, from the store's channel up to the two servers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
from prometheus_client import REGISTRY, CollectorRegistry

from fulmen.llm_proxy.v1 import (
    backend_service_pb2_grpc,
    capture_service_pb2_grpc,
    completion_service_pb2_grpc,
    route_service_pb2_grpc,
)
from fulmen_llm_proxy.attempts.watch import AttemptWatch
from fulmen_llm_proxy.backends.health_probe import HealthProbe
from fulmen_llm_proxy.capture.delivery import CaptureDelivery
from fulmen_llm_proxy.capture.shipper import SpanShipper
from fulmen_llm_proxy.capture.span_codec import SpanCodec
from fulmen_llm_proxy.capture.spool import DiskSpool
from fulmen_llm_proxy.capture.spool_folder import open_spool
from fulmen_llm_proxy.capture.token_lists import use_compiled
from fulmen_llm_proxy.metrics.captures import CaptureMetrics
from fulmen_llm_proxy.recording.delivery import RecordingDelivery
from fulmen_llm_proxy.routing.resources import RoutingWatch
from fulmen_llm_proxy.routing.retry import RetryPolicy
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_llm_proxy.transport.backend_servicer import BackendServicer
from fulmen_llm_proxy.transport.capture_servicer import CaptureServicer
from fulmen_llm_proxy.transport.completion_servicer import CompletionServicer
from fulmen_llm_proxy.transport.http.cors import Cors
from fulmen_llm_proxy.transport.http.http_app import HttpApp
from fulmen_llm_proxy.transport.http.metrics_page import MetricsPage
from fulmen_llm_proxy.transport.http.operator_app import OperatorApp
from fulmen_llm_proxy.transport.route_servicer import RouteServicer
from fulmen_llm_proxy.transport.views import Views
from fulmen_llm_proxy.wiring.data_plane import call_pipeline, http_app
from fulmen_llm_proxy.wiring.state import State, open_state
from fulmen_service_kit.http.server import ANSWERS_SHARE, HttpServer, bind, bind_private
from fulmen_service_kit.lifecycle import Role as BackgroundRole
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.rpc.server import RpcServer, build_server
from fulmen_service_kit.security.held_token import TokenRefresher
from fulmen_service_kit.settings import ServiceSettings

_PACKAGE = "fulmen.llm_proxy.v1"
SERVICE_NAMES = tuple(
    f"{_PACKAGE}.{name}" for name in ("RouteService", "BackendService", "CaptureService", "CompletionService")
)
_STORE_RETRY = RetryPolicy(deadline_s=float("inf"), first_delay_s=0.05, max_delay_s=0.5)
"""Retries of calls to the store: without a deadline, and often enough to follow within a second of its return."""


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the proxy; pushes its resources onto the stack.

    Raises:
        StartupError: if a port cannot be bound.
    """
    if not isinstance(settings, LlmProxySettings):
        raise TypeError("the proxy is built from LlmProxySettings")
    return await build_proxy(settings, stack, registry=REGISTRY)


async def build_proxy(
    settings: LlmProxySettings, stack: AsyncExitStack, *, registry: CollectorRegistry
) -> ServiceParts:
    """Builds the proxy with its metrics in the given registry."""
    await asyncio.to_thread(use_compiled)
    state, usage_sync = await open_state(settings, stack, registry)
    captures = CaptureMetrics(registry)
    captures.serves_alone.set_function(lambda: state.attempt_accounts.serves_alone)
    spool = await _spool(settings, state, captures, stack)
    calls = call_pipeline(settings, state)
    app = http_app(settings, state, calls)
    http, operator = _http_server(settings, state, app), _operator_server(settings, state, app)
    stack.callback(http.close)
    stack.callback(operator.close)
    draining = asyncio.Event()
    completions = CompletionServicer(
        calls=calls,
        draining=draining,
        buffer=state.buffer,
        max_request_bytes=settings.max_request_bytes,
        max_event_bytes=settings.max_answer_bytes,
        write_timeout_s=settings.write_timeout_s,
    )

    async def drain() -> None:
        draining.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(http.drain(), name="drain-http")
            group.create_task(completions.drain(settings.drain_grace_s * ANSWERS_SHARE), name="drain-rpcs")
        await state.queue.emptied()
        await state.app_calls.settled()
        await usage_sync.flush()
        await state.attempt_accounts.leave()

    return ServiceParts(
        server=_rpc_server(settings, state, completions, draining),
        roles={
            **_roles(settings, state, spool, captures),
            "usage-sync": usage_sync,
            "http-server": http,
            "operator-server": operator,
        },
        drain=drain,
        ports={"http_port": http.port, "metrics_port": operator.port},
        serve_metrics=False,
    )


async def _spool(
    settings: LlmProxySettings, state: State, metrics: CaptureMetrics, stack: AsyncExitStack
) -> DiskSpool | None:
    if not settings.spool_dir:
        return None
    return await open_spool(
        Path(settings.spool_dir),
        state.instance_id,
        max_bytes=settings.spool_bytes,
        ledger=state.ledger,
        metrics=metrics,
        stack=stack,
    )


def _http_server(settings: LlmProxySettings, state: State, app: HttpApp) -> HttpServer:
    return HttpServer(
        app=Cors(app, settings.origins()) if settings.cors_origins else app,
        listener=bind(settings.host, settings.http_port, shared=state.sockets is not None),
        grace_s=settings.drain_grace_s,
        tls=settings.own_tls(),
        write_timeout_s=settings.write_timeout_s,
    )


def _operator_server(settings: LlmProxySettings, state: State, app: HttpApp) -> HttpServer:
    metrics = MetricsPage(registry=state.registry, siblings=state.siblings, worker_index=settings.worker_index)
    return HttpServer(
        app=OperatorApp(app=app, metrics=metrics),
        listener=bind(settings.host, settings.metrics_port, shared=state.sockets is not None),
        private=None if state.sockets is None else bind_private(state.sockets.http),
        grace_s=settings.drain_grace_s,
    )


def _rpc_server(
    settings: LlmProxySettings, state: State, completions: CompletionServicer, draining: asyncio.Event
) -> RpcServer:
    views = Views(state.resources, project=settings.project)
    routes = RouteServicer(
        writer=state.writer, views=views, metrics=state.routing_metrics,
        draining=draining, max_of_project=settings.project_max_routes,
    )  # fmt: skip
    backends = BackendServicer(
        resources=state.resources, tables=state.tables, writer=state.writer, views=views,
        states=state.states, instance_id=state.instance_id, siblings=state.siblings,
    )  # fmt: skip
    captures = CaptureServicer(
        ledger=state.ledger, settlement=state.settlement, seats=state.states.seats, instance_id=state.instance_id,
    )  # fmt: skip

    def register(server: grpc.aio.Server) -> None:
        route_service_pb2_grpc.add_RouteServiceServicer_to_server(routes, server)
        backend_service_pb2_grpc.add_BackendServiceServicer_to_server(backends, server)
        capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(captures, server)
        completion_service_pb2_grpc.add_CompletionServiceServicer_to_server(completions, server)

    server = build_server(
        settings,
        verifier=state.followed.verifier,
        project=settings.project,
        service_names=SERVICE_NAMES,
        register=register,
        log_error_texts=False,
        private=None if state.sockets is None else state.sockets.rpc,
        limits=state.limits,
    )
    server.readiness.add("keys", lambda: "" if state.published.is_known else "not loaded from the store yet")
    server.readiness.add("backend keys", lambda: "" if state.key_watch.is_loaded else "not loaded from the store yet")
    server.readiness.add("routes", lambda: "" if state.tables.is_loaded else "not loaded from the store yet")
    return server


def _roles(
    settings: LlmProxySettings, state: State, spool: DiskSpool | None, metrics: CaptureMetrics
) -> dict[str, BackgroundRole]:
    return {
        "route-watch": RoutingWatch(
            channel=state.channel,
            project=settings.project,
            tables=state.tables,
            resources=state.resources,
            states=state.states,
            retry=_STORE_RETRY,
        ),
        "capture-delivery": CaptureDelivery(
            queue=state.queue,
            ledger=state.ledger,
            shipper=SpanShipper(
                channel=state.channel, codec=SpanCodec(instance_id=state.instance_id, prices=state.accounts.prices)
            ),
            spool=spool,
            retry=_STORE_RETRY,
            metrics=metrics,
        ),
        "attempt-accounts": state.attempt_accounts,
        "stale-engines": state.stale,
        "recording-delivery": RecordingDelivery(buffer=state.app_calls, channel=state.channel, retry=_STORE_RETRY),
        "revocations": state.followed.follower,
        "own-token": TokenRefresher(state.token, state.channel),
        "backend-key-watch": state.key_watch,
        "litellm": state.gateways,
        "attempt-watch": AttemptWatch(guard=state.guard, checks=state.checks, metrics=state.key_metrics),
        "health-probe": HealthProbe(
            session=state.session, tables=state.tables, states=state.states, interval_s=settings.health_interval_s,
            timeout_s=settings.health_timeout_s, cache_share=settings.worker_cache_share, keys=state.keys,
            gateways=state.gateways,
        ),
    }  # fmt: skip
