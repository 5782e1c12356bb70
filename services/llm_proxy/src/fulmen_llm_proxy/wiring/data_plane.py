"""The stages of a call, from the HTTP port to a backend."""

from __future__ import annotations

import time

from fulmen_llm_proxy.attempts.cache import AttemptCache
from fulmen_llm_proxy.backends.client import BackendClient
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
from fulmen_llm_proxy.calls.replay.lost_attempts import LostAttempts
from fulmen_llm_proxy.calls.replay.replays import Replays
from fulmen_llm_proxy.calls.responses.kept_responses import Keeping, KeptResponses
from fulmen_llm_proxy.calls.responses.response_ids import StoredResponseRouter
from fulmen_llm_proxy.calls.responses.response_store import ResponseStore
from fulmen_llm_proxy.calls.sender import CallSender, SendLimits
from fulmen_llm_proxy.calls.traces import CallTraces
from fulmen_llm_proxy.guards.build import open_guards
from fulmen_llm_proxy.metrics.calls import CallMetrics
from fulmen_llm_proxy.metrics.replays import ReplayMetrics
from fulmen_llm_proxy.metrics.responses import ResponseMetrics
from fulmen_llm_proxy.metrics.usage import UsageMetrics
from fulmen_llm_proxy.routing.late_routes import LateRoutes
from fulmen_llm_proxy.routing.retry import RetryPolicy
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_llm_proxy.transport.http.auth import HttpAuthenticator
from fulmen_llm_proxy.transport.http.effects import Effects
from fulmen_llm_proxy.transport.http.http_app import HttpApp, RequestLimits
from fulmen_llm_proxy.transport.http.passed_on import PassedOn
from fulmen_llm_proxy.transport.http.stored_responses import StoredResponses
from fulmen_llm_proxy.wiring.state import State
from fulmen_service_kit.observability.own_traces import own_traces
from fulmen_service_kit.security.token_buckets import TokenBuckets

__all__ = ["call_pipeline", "http_app"]

_REPLAY_SHARE = 8
"""Captured calls of one attempt may use at most 1/8 of the memory for all captured calls."""


def call_pipeline(settings: LlmProxySettings, state: State) -> CallPipeline:
    """Returns what plans, sends and records calls."""
    kept = KeptResponses(
        ResponseStore(state.channel), keeping=Keeping(settings.stored_responses), buffer=state.buffer,
        metrics=ResponseMetrics(state.registry),
    )  # fmt: skip
    planner = CallPlanner(
        tables=state.tables, states=state.states, responses=StoredResponseRouter(state.response_ids), kept=kept
    )
    cache = AnswerCache(max_bytes=settings.cache_bytes, ttl_s=settings.cache_ttl_s, clock=time.monotonic)
    meter = Meter(
        accounts=state.accounts,
        project=settings.project,
        assumed_completion_tokens=settings.assumed_completion_tokens,
        metrics=UsageMetrics(state.registry, state.accounts.usage),
    )
    lost = LostAttempts(
        channel=state.channel, settlement=state.settlement, max_bytes=settings.replay_bytes // _REPLAY_SHARE
    )
    client = BackendClient(
        session=state.session, keys=state.keys, gateways=state.gateways,
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
        memory=AnswerMemory(cache, state.routing_metrics, shared=state.shared_answers),
        replays=Replays(
            lost=lost,
            planner=planner,
            is_alone=lambda: state.attempt_accounts.is_alone,
            metrics=ReplayMetrics(state.registry),
            max_bytes=settings.replay_bytes,
        ),
        kept=kept,
        recorder=CallRecorder(
            metrics=CallMetrics(state.registry, state.tables),
            ledger=state.ledger,
            accounts=state.attempt_accounts,
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


def http_app(settings: LlmProxySettings, state: State, calls: CallPipeline) -> HttpApp:
    """Returns the app of the HTTP port."""
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
        stored=StoredResponses(
            ids=state.response_ids,
            client=stored,
            kept=ResponseStore(state.channel),
            tables=state.tables,
            guard=state.guard,
        ),
        declared=Effects(state.channel, guard=state.guard),
        passed_on=PassedOn(
            settings.pass_on, client=passed_on, tables=state.tables, states=state.states, gate=calls.gate
        ),
        limits=RequestLimits(
            max_bytes=settings.max_request_bytes, timeout_s=settings.request_timeout_s, buffer=state.buffer
        ),
        tables=state.tables,
    )
