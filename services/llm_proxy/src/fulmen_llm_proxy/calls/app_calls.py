"""Hands finished calls of apps to the recording, if their route records."""

from __future__ import annotations

from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.apis.usage import NO_COUNTS
from fulmen_llm_proxy.calls.running_call import RunningCall
from fulmen_llm_proxy.limits.prices import PriceTable
from fulmen_llm_proxy.recording.app_call import RECORDED_APIS, AppCall, is_sampled
from fulmen_llm_proxy.recording.buffer import RecordingBuffer
from fulmen_llm_proxy.routing.table_holder import TableHolder


class AppCalls:
    """Chooses the calls that are recorded."""

    def __init__(self, *, tables: TableHolder, prices: PriceTable, buffer: RecordingBuffer) -> None:
        self._tables = tables
        self._prices = prices
        self._buffer = buffer

    def finish(self, call: RunningCall, collected: Collected | None, elapsed_s: float) -> None:
        """Passes on a call without an attempt, if it is to be recorded."""
        request, project, named = call.request, call.caller.project, call.head.conversation
        route = self._tables.current.routes.get(request.model)
        if route is None or route.recording is None or request.api.name not in RECORDED_APIS:
            return
        if not route.is_open_to(call.caller.models_of) or not is_sampled(route.recording, project, named):
            return
        target = None if call.choice is None else call.choice.target
        counts = call.counts or NO_COUNTS
        cost = 0.0 if target is None else self._prices.cost_micros(target.backend_id, target.model, counts)
        self._buffer.offer(
            AppCall(
                recording=route.recording,
                project=project,
                conversation=named,
                model=request.model,
                target=target,
                fields=request.fields,
                answer_api=request.api if call.plan is None else call.plan.api,
                collected=collected,
                http_status=call.status,
                error_type=call.error_type,
                counts=counts,
                cost_micros=0.0 if call.from_cache else cost,
                start_ns=call.start_ns,
                elapsed_s=elapsed_s,
                size_bytes=call.size_bytes,
            )
        )
