"""Prepares a process for in-process agents: environment, HTTP clients, threads, instrumentors."""

import os

import structlog

from fulmen_runner.agents.environment import PLACEHOLDER_KEY, QUIET, Endpoints, network_environment
from fulmen_runner.agents.python.environment_view import show_attempts_environments
from fulmen_runner.agents.python.model_access import attribute_model_calls
from fulmen_runner.agents.python.shared_tls import share_tls_contexts
from fulmen_runner.agents.python.threads import carry_context_into_threads
from fulmen_runner.agents.tracing.instrumentation import instrument

_log = structlog.get_logger()


def prepare_process(endpoints: Endpoints) -> None:
    """Prepares this process, a runner or its child. Idempotent."""
    os.environ.update(network_environment(endpoints))
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    os.environ.update(endpoints.environment(PLACEHOLDER_KEY))
    carry_context_into_threads()
    show_attempts_environments()
    share_tls_contexts()
    if endpoints.llm_proxy_url:
        attribute_model_calls(endpoints.llm_proxy_url)
    chosen = instrument(endpoints.instrument, _report)
    if chosen:
        _log.info("instrumentors_chosen", instrumentors=chosen)


def _report(instrumentor: str, reason: str) -> None:
    _log.warning("instrumentor_failed", instrumentor=instrumentor, reason=reason)
