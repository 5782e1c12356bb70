"""Exports finished calls to the operator's traces: timing, target and outcome, never their content."""

from __future__ import annotations

from fulmen.ids import parse_attempt_name, span_id_of
from fulmen.spans import attributes as names
from fulmen_llm_proxy.capture import genai
from fulmen_llm_proxy.capture.call_span import clean
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_service_kit.observability.own_traces import OwnSpan, OwnTraces


class CallTraces:
    """Adds each call under the ids of its captured span, which are also the parent of the backend's spans."""

    def __init__(self, traces: OwnTraces) -> None:
        self._traces = traces

    def add(self, call: FinishedCall) -> None:
        """Adds a finished call."""
        name, model = parse_attempt_name(call.attribution.attempt), clean(call.model)
        attributes: dict[str, str | int | float] = {
            names.ROLLOUT: name.rollout,
            names.ATTEMPT: name.number,
            genai.OPERATION: call.api.operation,
            genai.REQUEST_MODEL: model,
            genai.HTTP_STATUS: call.http_status,
        }
        if call.backend is not None:
            attributes["fulmen.backend"] = call.backend.id
        if call.first_byte_s is not None:
            attributes[genai.RESPONSE_FIRST_CHUNK_S] = call.first_byte_s
        self._traces.add(
            OwnSpan(
                name=f"{call.api.operation} {model}",
                trace_id=call.place.trace_id,
                span_id=call.place.span_id,
                parent_id=call.place.parent_id or span_id_of(call.attribution.attempt),
                start_ns=call.start_ns,
                end_ns=call.end_ns,
                calls_out=True,
                attributes=attributes,
                error=call.error_type,
            )
        )
