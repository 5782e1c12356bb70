"""What the data plane, the control plane and the background roles share."""

from __future__ import annotations

import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry

from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_llm_proxy.attempts.guard import AttemptGuard
from fulmen_llm_proxy.attempts.watch import AttemptChecks
from fulmen_llm_proxy.backends.access import BackendKeys
from fulmen_llm_proxy.backends.client import open_session
from fulmen_llm_proxy.backends.key_watch import BackendKeyWatch
from fulmen_llm_proxy.backends.litellm.gateways import LitellmGateways
from fulmen_llm_proxy.calls.request_buffer import RequestBuffer
from fulmen_llm_proxy.calls.responses.response_ids import ResponseIds
from fulmen_llm_proxy.calls.shared_answers import SharedAnswers, open_shared_answers
from fulmen_llm_proxy.calls.stale_engines import StaleEngines
from fulmen_llm_proxy.capture.accounts import CaptureAccounts
from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.capture.settlement import CaptureSettlement
from fulmen_llm_proxy.limits.accounts import Accounts, open_accounts
from fulmen_llm_proxy.limits.prices import PriceTable
from fulmen_llm_proxy.limits.usage_sync import UsageSync
from fulmen_llm_proxy.metrics.keys import KeyMetrics
from fulmen_llm_proxy.metrics.recording import RecordingMetrics
from fulmen_llm_proxy.metrics.routing import RoutingMetrics
from fulmen_llm_proxy.metrics.shared_answers import SharedAnswerMetrics
from fulmen_llm_proxy.recording.buffer import RecordingBuffer
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.resources import ResourceCache, ResourceWriter
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_llm_proxy.workers.siblings import Siblings, WorkerSockets, join_workers
from fulmen_service_kit.security.held_token import HeldToken
from fulmen_service_kit.security.keys import PUBLIC_KEYS_FILE, PublishedKeys
from fulmen_service_kit.security.project_limits import ProjectLimits
from fulmen_service_kit.security.revocation import FollowedStore, follow_store
from fulmen_service_kit.security.sealing import BACKEND_KEYS_LABEL, Sealer
from fulmen_service_kit.security.secret import SigningKeys

__all__ = ["State", "open_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The shared parts."""

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
    attempt_accounts: CaptureAccounts
    settlement: CaptureSettlement
    checks: AttemptChecks
    guard: AttemptGuard
    queue: CaptureQueue
    app_calls: RecordingBuffer
    shared_answers: SharedAnswers | None
    followed: FollowedStore
    published: PublishedKeys
    response_ids: ResponseIds
    accounts: Accounts
    key_metrics: KeyMetrics
    session: aiohttp.ClientSession
    keys: BackendKeys
    gateways: LitellmGateways
    key_watch: BackendKeyWatch
    buffer: RequestBuffer
    limits: ProjectLimits
    siblings: Siblings | None
    sockets: WorkerSockets | None


async def open_state(
    settings: LlmProxySettings, stack: AsyncExitStack, registry: CollectorRegistry
) -> tuple[State, UsageSync]:
    """Creates the shared parts and the role that counts usage; pushes what has to be closed onto the stack."""
    token = HeldToken(settings.secret("token"))
    channel = open_channel(settings.store_target, token=token, tls=settings.peer_tls())
    stack.push_async_callback(channel.close)
    session = open_session(
        connect_timeout_s=settings.connect_timeout_s, first_byte_timeout_s=settings.first_byte_timeout_s
    )
    stack.push_async_callback(session.close)
    siblings, sockets = await join_workers(settings, token, stack)
    secrets, checks = settings.attempt_secrets(), AttemptChecks(channel)
    published = PublishedKeys(secrets, file=_keys_file(settings))
    followed = follow_store(channel, published, runs=checks.runs)
    backend_keys = BackendKeys(settings.backend_keys, defaults=settings.vendors_backend_keys())
    tables, resources = TableHolder(), ResourceCache()
    writer = ResourceWriter(channel=channel, project=settings.project, resources=resources, tables=tables)
    states = BackendStates(recheck_s=settings.recheck_s, clock=time.monotonic, wall_clock=time.time)
    routing_metrics = RoutingMetrics(registry, states, tables)
    ledger, instance_id = AttemptLedger(keep_s=settings.summary_keep_s, clock=time.monotonic), uuid.uuid4().hex
    queue = CaptureQueue(max_bytes=settings.capture_buffer_bytes)
    accounts = CaptureAccounts(channel=channel, instance_id=instance_id, ledger=ledger)
    state = State(
        instance_id=instance_id,
        channel=channel,
        token=token,
        registry=registry,
        tables=tables,
        resources=resources,
        writer=writer,
        states=states,
        routing_metrics=routing_metrics,
        stale=StaleEngines(writer=writer, resources=resources, tables=tables, metrics=routing_metrics),
        ledger=ledger,
        attempt_accounts=accounts,
        settlement=CaptureSettlement(ledger=ledger, queue=queue, accounts=accounts),
        checks=checks,
        guard=AttemptGuard(clock=followed.clock),
        queue=queue,
        shared_answers=_shared_answers(settings, secrets, stack, registry),
        app_calls=RecordingBuffer(max_bytes=settings.recording_buffer_bytes, metrics=RecordingMetrics(registry)),
        followed=followed,
        published=published,
        response_ids=ResponseIds(secrets.accepted),
        accounts=open_accounts(PriceTable(settings.resolved_prices())),
        key_metrics=KeyMetrics(registry),
        session=session,
        keys=backend_keys,
        gateways=LitellmGateways(settings, tables),
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


def _keys_file(settings: LlmProxySettings) -> Path | None:
    """Returns where the store's keys are kept over restarts; None if there is no folder for it."""
    return Path(settings.spool_dir) / PUBLIC_KEYS_FILE if settings.spool_dir else None


def _shared_answers(
    settings: LlmProxySettings, secrets: SigningKeys, stack: AsyncExitStack, registry: CollectorRegistry
) -> SharedAnswers | None:
    """Returns the answer cache that proxies share; None without one."""
    metrics, url = SharedAnswerMetrics(registry), settings.cache_url.get_secret_value()
    if not url:
        return None
    shared = open_shared_answers(url, secrets=secrets.accepted, ttl_s=settings.cache_ttl_s, metrics=metrics)
    stack.push_async_callback(shared.close)
    return shared
