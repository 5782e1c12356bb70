"""Wires the proxy: the one file that knows all parts, from the store's channel up to the two servers."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc.aio
from prometheus_client import REGISTRY, CollectorRegistry

from fulmen.llm_proxy.v1 import (
    backend_service_pb2_grpc,
    capture_service_pb2_grpc,
    completion_service_pb2_grpc,
    route_service_pb2_grpc,
)
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_llm_proxy.attempts.cache import AttemptCache
from fulmen_llm_proxy.attempts.guard import AttemptGuard
from fulmen_llm_proxy.attempts.watch import AttemptChecks, AttemptWatch
from fulmen_llm_proxy.backends.access import BackendKeys
from fulmen_llm_proxy.backends.client import BackendClient, open_session
from fulmen_llm_proxy.backends.health_probe import HealthProbe
from fulmen_llm_proxy.backends.key_watch import BackendKeyWatch
from fulmen_llm_proxy.backends.passed_on import PassedOnClient
from fulmen_llm_proxy.backends.stored_responses import StoredResponsesClient
from fulmen_llm_proxy.calls.answer_cache import AnswerCache
from fulmen_llm_proxy.calls.answer_memory import AnswerMemory
from fulmen_llm_proxy.calls.app_calls import AppCalls
from fulmen_llm_proxy.calls.gate import Gate
from fulmen_llm_proxy.calls.guarding import CallGuards
from fulmen_llm_proxy.calls.meter import Meter
from fulmen_llm_proxy.calls.pipeline import CallPipeline
from fulmen_llm_proxy.calls.planner import CallPlanner
from fulmen_llm_proxy.calls.recorder import CallRecorder
from fulmen_llm_proxy.calls.request_buffer import RequestBuffer
from fulmen_llm_proxy.calls.response_ids import ResponseIds, StoredResponseRouter
from fulmen_llm_proxy.calls.sender import CallSender, SendLimits
from fulmen_llm_proxy.calls.stale_engines import StaleEngines
from fulmen_llm_proxy.calls.traces import CallTraces
from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.capture.delivery import CaptureDelivery
from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.capture.shipper import SpanShipper
from fulmen_llm_proxy.capture.span_codec import SpanCodec
from fulmen_llm_proxy.capture.spool import DiskSpool
from fulmen_llm_proxy.capture.spool_folder import open_spool
from fulmen_llm_proxy.guards.build import open_guards
from fulmen_llm_proxy.limits.accounts import Accounts, open_accounts
from fulmen_llm_proxy.limits.prices import PriceTable
from fulmen_llm_proxy.limits.usage_sync import UsageSync
from fulmen_llm_proxy.metrics.calls import CallMetrics
from fulmen_llm_proxy.metrics.captures import CaptureMetrics
from fulmen_llm_proxy.metrics.keys import KeyMetrics
from fulmen_llm_proxy.metrics.recording import RecordingMetrics
from fulmen_llm_proxy.metrics.routing import RoutingMetrics
from fulmen_llm_proxy.metrics.usage import UsageMetrics
from fulmen_llm_proxy.recording.buffer import RecordingBuffer
from fulmen_llm_proxy.recording.delivery import RecordingDelivery
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.late_routes import LateRoutes
from fulmen_llm_proxy.routing.resources import ResourceCache, ResourceWriter, RoutingWatch
from fulmen_llm_proxy.routing.retry import RetryPolicy
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_llm_proxy.transport.backend_servicer import BackendServicer
from fulmen_llm_proxy.transport.capture_servicer import CaptureServicer
from fulmen_llm_proxy.transport.completion_servicer import CompletionServicer
from fulmen_llm_proxy.transport.http.auth import HttpAuthenticator
from fulmen_llm_proxy.transport.http.cors import Cors
from fulmen_llm_proxy.transport.http.http_app import HttpApp, RequestLimits
from fulmen_llm_proxy.transport.http.metrics_page import MetricsPage
from fulmen_llm_proxy.transport.http.operator_app import OperatorApp
from fulmen_llm_proxy.transport.http.passed_on import PassedOn
from fulmen_llm_proxy.transport.http.stored_responses import StoredResponses
from fulmen_llm_proxy.transport.route_servicer import RouteServicer
from fulmen_llm_proxy.workers.siblings import Siblings, WorkerSockets, join_workers
from fulmen_service_kit.http.server import ANSWERS_SHARE, HttpServer, bind, bind_private
from fulmen_service_kit.lifecycle import Role as BackgroundRole
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.observability.own_traces import own_traces
from fulmen_service_kit.rpc.server import RpcServer, build_server
from fulmen_service_kit.security.held_token import HeldToken, TokenRefresher
from fulmen_service_kit.security.keys import PUBLIC_KEYS_FILE, PublishedKeys
from fulmen_service_kit.security.project_limits import ProjectLimits
from fulmen_service_kit.security.revocation import FollowedStore, follow_store
from fulmen_service_kit.security.sealing import BACKEND_KEYS_LABEL, Sealer
from fulmen_service_kit.security.token_buckets import TokenBuckets
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The state shared by the data plane, the control plane and the background roles."""

    instance_id: str
    channel: FulmenChannel
    token: HeldToken
    registry: CollectorRegistry
    tables: TableHolder
    resources: ResourceCache
    writer: ResourceWriter
    states: BackendStates
    routing_metrics: RoutingMetrics
    stale: StaleEngines
    ledger: AttemptLedger
    checks: AttemptChecks
    guard: AttemptGuard
    queue: CaptureQueue
    app_calls: RecordingBuffer
    followed: FollowedStore
    published: PublishedKeys
    response_ids: ResponseIds
    accounts: Accounts
    key_metrics: KeyMetrics
    session: aiohttp.ClientSession
    keys: BackendKeys
    key_watch: BackendKeyWatch
    buffer: RequestBuffer
    limits: ProjectLimits
    siblings: Siblings | None
    sockets: WorkerSockets | None


async def build_proxy(
    settings: LlmProxySettings, stack: AsyncExitStack, *, registry: CollectorRegistry
) -> ServiceParts:
    """Builds the proxy with its metrics in the given registry."""
    state, usage_sync = await _state(settings, stack, registry)
    captures = CaptureMetrics(registry)
    spool = await _spool(settings, state, captures, stack)
    calls = _call_pipeline(settings, state)
    app = _http_app(settings, state, calls)
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


async def _state(
    settings: LlmProxySettings, stack: AsyncExitStack, registry: CollectorRegistry
) -> tuple[_State, UsageSync]:
    token = HeldToken(settings.secret("token"))
    channel = open_channel(settings.store_target, token=token, tls=settings.peer_tls())
    stack.push_async_callback(channel.close)
    session = open_session(
        connect_timeout_s=settings.connect_timeout_s, first_byte_timeout_s=settings.first_byte_timeout_s
    )
    stack.push_async_callback(session.close)
    siblings, sockets = await join_workers(settings, token, stack)
    secrets, checks = settings.attempt_secrets(), AttemptChecks(channel)
    keys_file = Path(settings.spool_dir) / PUBLIC_KEYS_FILE if settings.spool_dir else None
    published = PublishedKeys(secrets, file=keys_file)
    followed = follow_store(channel, published, runs=checks.runs)
    backend_keys = BackendKeys(settings.backend_keys, defaults=settings.vendors_backend_keys())
    tables, resources = TableHolder(), ResourceCache()
    writer = ResourceWriter(channel=channel, project=settings.project, resources=resources, tables=tables)
    states = BackendStates(recheck_s=settings.recheck_s, clock=time.monotonic, wall_clock=time.time)
    routing_metrics = RoutingMetrics(registry, states, tables)
    state = _State(
        instance_id=uuid.uuid4().hex,
        channel=channel,
        token=token,
        registry=registry,
        tables=tables,
        resources=resources,
        writer=writer,
        states=states,
        routing_metrics=routing_metrics,
        stale=StaleEngines(writer=writer, resources=resources, tables=tables, metrics=routing_metrics),
        ledger=AttemptLedger(keep_s=settings.summary_keep_s, clock=time.monotonic),
        checks=checks,
        guard=AttemptGuard(clock=followed.clock),
        queue=CaptureQueue(max_bytes=settings.capture_buffer_bytes),
        app_calls=RecordingBuffer(max_bytes=settings.recording_buffer_bytes, metrics=RecordingMetrics(registry)),
        followed=followed,
        published=published,
        response_ids=ResponseIds(secrets.accepted),
        accounts=open_accounts(PriceTable(settings.resolved_prices())),
        key_metrics=KeyMetrics(registry),
        session=session,
        keys=backend_keys,
        key_watch=BackendKeyWatch(
            channel=channel,
            project=settings.project,
            keys=backend_keys,
            sealer=Sealer(secrets.accepted, BACKEND_KEYS_LABEL) if secrets else None,
            configured=settings.current_backend_keys,
        ),
        buffer=RequestBuffer(max(settings.request_buffer_bytes, settings.max_request_bytes)),
        limits=ProjectLimits.configured(settings),
        siblings=siblings,
        sockets=sockets,
    )
    return state, UsageSync(
        channel=channel,
        instance_id=state.instance_id,
        usage=state.accounts.usage,
        limiter=state.accounts.limiter,
        budgets=state.accounts.budgets,
        clock=state.accounts.clock,
    )


async def _spool(
    settings: LlmProxySettings, state: _State, metrics: CaptureMetrics, stack: AsyncExitStack
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


def _call_pipeline(settings: LlmProxySettings, state: _State) -> CallPipeline:
    planner = CallPlanner(tables=state.tables, states=state.states, responses=StoredResponseRouter(state.response_ids))
    cache = AnswerCache(max_bytes=settings.cache_bytes, ttl_s=settings.cache_ttl_s, clock=time.monotonic)
    meter = Meter(
        accounts=state.accounts,
        project=settings.project,
        assumed_completion_tokens=settings.assumed_completion_tokens,
        metrics=UsageMetrics(state.registry, state.accounts.usage),
    )
    client = BackendClient(
        session=state.session, keys=state.keys,
        silence_s=settings.read_timeout_s, max_answer_bytes=settings.max_answer_bytes,
    )  # fmt: skip
    limits = SendLimits(
        deadline_s=settings.answer_deadline_s, queue_timeout_s=settings.queue_timeout_s,
        max_waiting=settings.max_waiting_per_backend,
    )  # fmt: skip
    sender = CallSender(
        planner=planner, client=client, tables=state.tables, states=state.states,
        retry=RetryPolicy(deadline_s=settings.retry_deadline_s), limits=limits, metrics=state.routing_metrics,
    )  # fmt: skip
    return CallPipeline(
        gate=Gate(
            tables=state.tables,
            queue=state.queue,
            guard=state.guard,
            meter=meter,
            seats=state.states.seats,
            max_in_flight=settings.max_in_flight,
        ),
        guard=state.guard,
        tables=state.tables,
        late_routes=LateRoutes(state.writer),
        planner=planner,
        sender=sender,
        memory=AnswerMemory(cache, state.routing_metrics),
        recorder=CallRecorder(
            metrics=CallMetrics(state.registry, state.tables),
            ledger=state.ledger,
            queue=state.queue,
            app_calls=AppCalls(tables=state.tables, prices=state.accounts.prices, buffer=state.app_calls),
            stale=state.stale,
            traces=None if (traces := own_traces()) is None else CallTraces(traces),
        ),
        guards=CallGuards(
            open_guards(settings.guards, state.session, state.registry), max_answer_bytes=settings.max_answer_bytes
        ),
        max_event_bytes=settings.max_answer_bytes,
    )


def _http_app(settings: LlmProxySettings, state: _State, calls: CallPipeline) -> HttpApp:
    authenticator = HttpAuthenticator(
        verifier=state.followed.verifier,
        forged_keys=TokenBuckets.per_minute(settings.auth_failures_per_minute),
        metrics=state.key_metrics,
        dev_mode=settings.dev_mode,
        limits=state.limits,
    )
    stored = StoredResponsesClient(
        session=state.session,
        keys=state.keys,
        max_answer_bytes=settings.max_answer_bytes,
        deadline_s=settings.answer_deadline_s,
    )
    passed_on = PassedOnClient(
        session=state.session,
        keys=state.keys,
        max_answer_bytes=settings.max_answer_bytes,
        deadline_s=settings.answer_deadline_s,
    )
    return HttpApp(
        authenticator=authenticator,
        attempts=AttemptCache(state.checks),
        calls=calls,
        stored=StoredResponses(ids=state.response_ids, client=stored, tables=state.tables, guard=state.guard),
        passed_on=PassedOn(
            settings.pass_on, client=passed_on, tables=state.tables, states=state.states, gate=calls.gate
        ),
        limits=RequestLimits(
            max_bytes=settings.max_request_bytes, timeout_s=settings.request_timeout_s, buffer=state.buffer
        ),
        tables=state.tables,
    )


def _http_server(settings: LlmProxySettings, state: _State, app: HttpApp) -> HttpServer:
    return HttpServer(
        app=Cors(app, settings.origins()) if settings.cors_origins else app,
        listener=bind(settings.host, settings.http_port, shared=state.sockets is not None),
        grace_s=settings.drain_grace_s,
        tls=settings.own_tls(),
        write_timeout_s=settings.write_timeout_s,
    )


def _operator_server(settings: LlmProxySettings, state: _State, app: HttpApp) -> HttpServer:
    metrics = MetricsPage(registry=state.registry, siblings=state.siblings, worker_index=settings.worker_index)
    return HttpServer(
        app=OperatorApp(app=app, metrics=metrics),
        listener=bind(settings.host, settings.metrics_port, shared=state.sockets is not None),
        private=None if state.sockets is None else bind_private(state.sockets.http),
        grace_s=settings.drain_grace_s,
    )


def _rpc_server(
    settings: LlmProxySettings, state: _State, completions: CompletionServicer, draining: asyncio.Event
) -> RpcServer:
    routes = RouteServicer(
        writer=state.writer, metrics=state.routing_metrics,
        draining=draining, max_of_project=settings.project_max_routes,
    )  # fmt: skip
    backends = BackendServicer(
        resources=state.resources, tables=state.tables, writer=state.writer, states=state.states,
        instance_id=state.instance_id, siblings=state.siblings,
    )  # fmt: skip
    captures = CaptureServicer(
        ledger=state.ledger, queue=state.queue, seats=state.states.seats,
        instance_id=state.instance_id, siblings=state.siblings,
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
    settings: LlmProxySettings, state: _State, spool: DiskSpool | None, metrics: CaptureMetrics
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
        "stale-engines": state.stale,
        "recording-delivery": RecordingDelivery(buffer=state.app_calls, channel=state.channel, retry=_STORE_RETRY),
        "revocations": state.followed.follower,
        "own-token": TokenRefresher(state.token, state.channel),
        "backend-key-watch": state.key_watch,
        "attempt-watch": AttemptWatch(guard=state.guard, checks=state.checks, metrics=state.key_metrics),
        "health-probe": HealthProbe(
            session=state.session, tables=state.tables, states=state.states, interval_s=settings.health_interval_s,
            timeout_s=settings.health_timeout_s, cache_share=settings.worker_cache_share, keys=state.keys,
        ),
    }  # fmt: skip
