"""Model calls in the operator's traces: at the place of their captured spans, without what was said."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from fulmen.ids import span_id_of
from fulmen_llm_proxy.calls.traces import CallTraces
from fulmen_llm_proxy.capture.span_place import place_of
from tests.support.llm_proxy.finished_calls import ATTEMPT, collected_of, finished, span_of
from tests.support.service_kit.own_traces import KeptTraces, id_of, parent_of

OF_AGENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_call_is_where_its_captured_span_is() -> None:
    kept = KeptTraces()
    for header in ("", OF_AGENT):
        call = finished({"messages": []}, None, place=place_of(header, ATTEMPT))
        captured = span_of(call)
        CallTraces(kept.traces).add(call)
        span = kept.spans[-1]
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == captured.trace_id.hex()
        assert (id_of(span), parent_of(span)) == (captured.span_id.hex(), captured.parent_span_id.hex())
        assert (span.start_time, span.end_time) == (call.start_ns, call.end_ns)
    assert [parent_of(span) for span in kept.spans] == [span_id_of(ATTEMPT), "b7ad6b7169203331"]


def test_nothing_that_was_said_is_told() -> None:
    kept = KeptTraces()
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hush-answer"}}]}
    asked = {"messages": [{"role": "user", "content": "hush-question"}]}
    CallTraces(kept.traces).add(finished(asked, collected_of(answer)))
    [span] = kept.spans
    assert "hush" not in span.to_json()
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "tiny"
    assert span.attributes["http.response.status_code"] == 200


def test_a_call_that_failed_says_how() -> None:
    kept = KeptTraces()
    CallTraces(kept.traces).add(
        finished({}, None, http_status=503, error_type="backend_unavailable", backend=None, first_byte_s=None)
    )
    [span] = kept.spans
    assert span.status.description == "backend_unavailable"


def test_a_name_that_no_text_can_carry_is_told_as_far_as_it_can_be() -> None:
    kept = KeptTraces()
    CallTraces(kept.traces).add(finished({}, None, model="tiny\ud800"))
    [span] = kept.spans
    assert span.name == "chat tiny?"
    encode_spans(kept.spans)  # as the exporter does
