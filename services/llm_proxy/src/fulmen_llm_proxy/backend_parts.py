"""The parts of the proxy that have to do with backends: how calls are sent, how backends are probed."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from fulmen_llm_proxy.backends.access import BackendKeys
from fulmen_llm_proxy.backends.client import BackendClient, open_session
from fulmen_llm_proxy.backends.health_probe import HealthProbe
from fulmen_llm_proxy.backends.hold import BackendHold
from fulmen_llm_proxy.backends.kept_responses import KeptResponsesClient
from fulmen_llm_proxy.calls.answer_cache import AnswerCache
from fulmen_llm_proxy.calls.answer_memory import AnswerMemory
from fulmen_llm_proxy.calls.sender import CallSender, SendLimits
from fulmen_llm_proxy.metrics.routing import RoutingMetrics
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.retry import RetryPolicy
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.settings import LlmProxySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendParts:
    """What calls go through, and the role that looks after the backends."""

    sender: CallSender
    memory: AnswerMemory
    kept: KeptResponsesClient
    probe: HealthProbe
    metrics: RoutingMetrics


def new_states(settings: LlmProxySettings) -> BackendStates:
    """Returns an empty set of states."""
    return BackendStates(recheck_s=settings.recheck_s, clock=time.monotonic, wall_clock=time.time)


def wire_backends(
    settings: LlmProxySettings,
    *,
    tables: TableHolder,
    states: BackendStates,
    registry: CollectorRegistry,
    stack: AsyncExitStack,
) -> BackendParts:
    """Wires the parts; what must be closed goes on the stack."""
    session = open_session(
        connect_timeout_s=settings.connect_timeout_s, first_byte_timeout_s=settings.first_byte_timeout_s
    )
    stack.push_async_callback(session.close)
    metrics = RoutingMetrics(registry, states)
    keys = BackendKeys({name: key.get_secret_value() for name, key in settings.backend_keys.items()})
    client = BackendClient(
        session=session,
        keys=keys,
        silence_s=settings.read_timeout_s,
        max_answer_bytes=settings.max_answer_bytes,
    )
    sender = CallSender(
        client=client,
        states=states,
        hold=BackendHold(tables=tables, states=states, wall_clock=time.time),
        retry=RetryPolicy(deadline_s=settings.retry_deadline_s),
        limits=SendLimits(
            deadline_s=settings.answer_deadline_s,
            queue_timeout_s=settings.queue_timeout_s,
            max_waiting=settings.max_waiting_per_backend,
        ),
        figures=metrics,
    )
    probe = HealthProbe(
        session=session,
        tables=tables,
        states=states,
        interval_s=settings.health_interval_s,
        timeout_s=settings.health_timeout_s,
    )
    kept = KeptResponsesClient(
        session=session,
        keys=keys,
        max_answer_bytes=settings.max_answer_bytes,
        deadline_s=settings.answer_deadline_s,
    )
    cache = AnswerCache(max_bytes=settings.cache_bytes, ttl_s=settings.cache_ttl_s, clock=time.monotonic)
    memory = AnswerMemory(cache, metrics.looked_up)
    return BackendParts(sender=sender, memory=memory, kept=kept, probe=probe, metrics=metrics)
