"""Accounts for calls: metrics, the attempt's ledger, the capture queue and traces."""

from __future__ import annotations

import time

from fulmen.errors import FulmenError
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.apis.usage import token_counts
from fulmen_llm_proxy.calls.app_calls import AppCalls
from fulmen_llm_proxy.calls.failures import Refused, code_of, is_infrastructure, is_throttled, status_of
from fulmen_llm_proxy.calls.running_call import RunningCall
from fulmen_llm_proxy.calls.stale_engines import StaleEngines
from fulmen_llm_proxy.calls.traces import CallTraces
from fulmen_llm_proxy.capture.accounts import CaptureAccounts
from fulmen_llm_proxy.capture.capture_queue import CaptureQueue
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.metrics.calls import CallMetrics


class CallRecorder:
    """Keeps the accounts of running and finished calls."""

    def __init__(
        self,
        *,
        metrics: CallMetrics,
        ledger: AttemptLedger,
        accounts: CaptureAccounts,
        queue: CaptureQueue,
        app_calls: AppCalls,
        stale: StaleEngines,
        traces: CallTraces | None,
    ) -> None:
        """Sets the accounts.

        Args:
            accounts: what the store knows of the ledger.
            app_calls: for calls without an attempt.
            stale: judges the policy versions of answers.
            traces: the operator's traces; None if traces are not exported.
        """
        self._metrics = metrics
        self._ledger = ledger
        self._accounts = accounts
        self._queue = queue
        self._app_calls = app_calls
        self._stale = stale
        self._traces = traces

    def begin(self, call: RunningCall) -> None:
        """Counts a call that starts."""
        self._metrics.in_flight += 1
        attribution = call.caller.attribution
        if attribution is not None:
            self._ledger.begin(attribution.attempt)

    async def opened(self, call: RunningCall) -> None:
        """Waits until the call may be answered: the store knows that this process serves its attempt.

        Raises:
            Unavailable: if the store is unavailable for long; retryable.
        """
        attribution = call.caller.attribution
        if attribution is not None:
            await self._accounts.opened(attribution.attempt, leased_s=attribution.leased_s)

    def reject(self, error: FulmenError | Refused) -> None:
        """Counts a request that did not become a call."""
        self._metrics.failed(code_of(error), status_of(error))

    def charge_not_served(self, attempt: str, error: FulmenError | Refused) -> None:
        """Records on an attempt that a request was refused for a reason that is not the agent's fault.

        Args:
            attempt: its name; empty for a caller without an attempt.
            error: the refusal; one that is the agent's fault is not recorded.
        """
        status = status_of(error)
        if attempt and is_infrastructure(status):
            self._ledger.begin(attempt)
            self._ledger.end(attempt, recorded=False, infra_failure=True, throttled=is_throttled(status))

    def finish(self, call: RunningCall) -> None:
        """Counts a finished call, releases its permit, and queues its capture."""
        elapsed_s = time.perf_counter() - call.started
        collected = _read_usage(call)
        used = call.permit.close(
            None if call.from_cache else call.counts,
            collected=None if call.from_cache else collected,
            target=None if call.choice is None else call.choice.target,
            failed=bool(call.error_type),
        )
        metrics = self._metrics
        metrics.in_flight -= 1
        metrics.ended(
            choice=call.choice,
            api=call.request.api.name,
            status=call.status,
            elapsed_s=elapsed_s,
            first_token_s=call.first_byte_s,
            streamed=call.request.stream,
            used=used,
        )
        if call.error_type:
            metrics.failed(call.error_type, call.status)
        if collected is not None and call.choice is not None and not call.from_cache:
            self._stale.judge(call.choice, collected)
        attribution = call.caller.attribution
        if attribution is None or call.place is None:
            self._app_calls.finish(call, collected, elapsed_s)
            return
        plan = call.plan
        finished = FinishedCall(
            attribution=attribution,
            api=call.request.api if plan is None else plan.api,
            model=call.request.model,
            target=None if call.choice is None else call.choice.target,
            backend=None if call.choice is None else call.choice.backend,
            stream=call.request.stream,
            fields={} if plan is None else plan.fields,
            collected=collected,
            captured=plan is not None and plan.captured,
            http_status=call.status,
            error_type=call.error_type,
            start_ns=call.start_ns,
            end_ns=call.start_ns + int(elapsed_s * 1e9),
            first_byte_s=call.first_byte_s,
            resend_count=call.head.resend_count,
            place=call.place,
            agent_name=call.head.agent_name,
            size_bytes=call.size_bytes,
            replayed_span=call.replayed_span,
        )
        self._queue.put(finished)
        if self._traces is not None:
            self._traces.add(finished)
        self._ledger.end(
            attribution.attempt,
            recorded=True,
            infra_failure=call.was_cut_off or is_infrastructure(call.status),
            throttled=is_throttled(call.status),
        )


def _read_usage(call: RunningCall) -> Collected | None:
    """Reads the token counts of the call's answer; returns the answer's slices, or None without an answer."""
    if call.plan is None or not call.answered:
        return None
    collected = call.plan.reader.collected
    try:
        call.counts = token_counts(collected.usage)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        collected.malformed = True
    return collected
