"""The span of a model call: complete by the conventions, in its place in the trace, and made whatever comes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.ids import span_id_of
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_llm_proxy.apis.api import Dialect
from fulmen_llm_proxy.apis.collected import Asked
from fulmen_llm_proxy.capture.span_codec import MAX_PAYLOAD_BYTES
from fulmen_llm_proxy.capture.span_place import SpanPlace, place_of
from fulmen_llm_proxy.routing.engines import Engine
from fulmen_llm_proxy.routing.table import Backend
from fulmen_runner.agents.environment import traceparent
from tests.support.llm_proxy.finished_calls import (
    ATTEMPT,
    CHAT,
    CODEC,
    JSON,
    TRACE_ID,
    attributes,
    batches,
    collected_of,
    finished,
    span_of,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def test_a_span_says_everything_that_the_conventions_name() -> None:
    fields = {
        "model": "byte-model",
        "messages": [],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_completion_tokens": 64,
        "seed": 11,
        "n": 2,
        "stop": ["a", "b"],
        "frequency_penalty": 0.1,
        "presence_penalty": -0.2,
        "conversation": {"id": "talk-1"},
    }
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
        "cache_creation_input_tokens": 3,
    }
    choices = [{"index": i, "message": {}, "finish_reason": r} for i, r in enumerate(["stop", "length"])]
    document = {"id": "chatcmpl-7", "model": "byte-model-0613", "choices": choices, "usage": usage}
    span = span_of(finished(fields, collected_of(document), stream=True, agent_name="planner", resend_count=1))
    assert (span.name, span.kind) == ("chat tiny", Span.SPAN_KIND_CLIENT)
    assert attributes(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.agent.name": "planner",
        "gen_ai.conversation.id": "talk-1",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40.0,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.seed": 11,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ["a", "b"],
        "gen_ai.request.frequency_penalty": 0.1,
        "gen_ai.request.presence_penalty": -0.2,
        "gen_ai.response.id": "chatcmpl-7",
        "gen_ai.response.model": "byte-model-0613",
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.cache_creation.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 1,
        "server.address": "models.example",
        "server.port": 8443,
        "http.request.resend_count": 1,
        "http.response.status_code": 200,
        "fulmen.attempt.epoch": 1,
        "fulmen.backend": "one",
        "fulmen.mode": "train",
    }


def test_a_call_that_failed_says_why() -> None:
    span = span_of(finished({}, None, error_type="backend_500", http_status=500, first_byte_s=None))
    assert attributes(span)["error.type"] == "backend_500"
    assert span.status.code == span.status.STATUS_CODE_ERROR


@pytest.mark.parametrize(
    ("backend", "provider", "port"),
    [
        (Backend(id="a", base_url="http://one/v1"), "openai", 80),
        (Backend(id="a", base_url="https://one/v1", azure=True), "azure.ai.openai", 443),
        (Backend(id="a", base_url="https://one/v1", dialect=Dialect.ANTHROPIC), "anthropic", 443),
        (Backend(id="a", base_url="http://one:99999999/v1", engine=Engine.SGLANG), "sglang", 80),
    ],
)
def test_the_provider_is_that_of_the_backend(backend: Backend, provider: str, port: int) -> None:
    found = attributes(span_of(finished({}, None, backend=backend)))
    assert (found["gen_ai.provider.name"], found["server.port"]) == (provider, port)


def test_a_field_of_a_wrong_type_or_beyond_every_range_is_left_out_and_the_others_stay() -> None:
    found = attributes(span_of(finished({"temperature": "hot", "top_p": 0.5, "seed": 10**30, "stop": "x"}, None)))
    assert "gen_ai.request.temperature" not in found
    assert "gen_ai.request.seed" not in found
    assert (found["gen_ai.request.top_p"], found["gen_ai.request.stop_sequences"]) == (0.5, ["x"])


def test_a_call_is_below_the_callers_span_and_the_backend_below_the_calls() -> None:
    place = place_of(f"00-{'a' * 32}-{'b' * 16}-00", ATTEMPT)
    span = span_of(finished({}, None, place=place))
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == ("a" * 32, "b" * 16)
    assert place.header == f"00-{'a' * 32}-{span.span_id.hex()}-00"


@pytest.mark.parametrize("said", ["", "nonsense", f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01"])
def test_a_call_without_a_good_parent_is_below_its_attempt_as_the_runner_names_it(said: str) -> None:
    place = place_of(said, ATTEMPT)
    span = span_of(finished({}, None, place=place))
    of_runner = traceparent(ATTEMPT).split("-")
    assert [span.trace_id.hex(), span.parent_span_id.hex()] == of_runner[1:3] == [TRACE_ID, span_id_of(ATTEMPT)]
    assert place.header == f"00-{TRACE_ID}-{span.span_id.hex()}-01"


def test_span_ids_differ() -> None:
    assert len({place_of("", ATTEMPT).span_id for _ in range(1000)}) == 1000


@given(
    fields=st.dictionaries(
        st.sampled_from(["temperature", "top_p", "seed", "n", "stop", "max_tokens", "conversation", "model", "x"]),
        json_values,
    ),
    events=st.lists(
        st.dictionaries(
            st.sampled_from(
                ["id", "model", "choices", "usage", "prompt_token_ids", "weight_versions", "message", "error"]
            ),
            json_values
            | st.lists(
                st.dictionaries(
                    st.sampled_from(
                        ["index", "delta", "token_ids", "logprobs", "finish_reason", "weight_versions", "message"]
                    ),
                    json_values,
                ),
                max_size=3,
            ),
        ).map(lambda document: json.dumps(document).encode())
        | st.binary(max_size=20)
        | json_values.map(lambda value: json.dumps(value).encode()),
        max_size=4,
    ),
    stream=st.booleans(),
)
@settings(deadline=None)
def test_no_request_and_no_answer_is_too_strange_to_be_recorded(
    fields: JSON, events: list[bytes], stream: bool
) -> None:
    reader = CHAT.reader(Asked())
    if stream:
        for event in events:
            reader.event(b"data: " + event.replace(b"\n", b" ") + b"\n\n")
        reader.end()
    elif events:
        reader.whole(events[0])
    call = finished(fields, reader.collected, stream=stream)
    encoded = CODEC.encode(call)
    [packed] = CODEC.pack([encoded])
    [batch] = batches([packed])
    assert (packed.calls, packed.attempt) == (1, ATTEMPT)
    records = [ModelCallRecord.FromString(record.model_call) for record in batch.spans]
    assert all(record.usable == (record.unusable_reason == "") for record in records)
    assert packed.trainable == all(record.usable for record in records)


def test_chunks_hold_one_attempt_one_kind_and_no_more_than_the_store_takes() -> None:
    good = {"choices": [{"index": 0, "message": {}, "token_ids": [1], "finish_reason": "stop",
                         "logprobs": {"content": [{"logprob": -1}]}}],
            "prompt_token_ids": [1], "usage": {"completion_tokens": 1, "prompt_tokens": 1}}  # fmt: skip
    calls = []
    for number in range(8):
        document = good if number % 4 else {**good, "usage": None}
        calls.append(finished({"messages": "m" * 400_000, "seed": number}, collected_of(document)))
    packed = CODEC.pack([CODEC.encode(call) for call in calls])
    assert [one.chunk_id for one in packed] == sorted(one.chunk_id for one in packed)
    assert sum(one.calls for one in packed) == 8
    assert (sum(one.unusable for one in packed), sum(one.captured for one in packed)) == (2, 8)
    seeds = []
    for one, batch in zip(packed, batches(packed), strict=True):
        assert batch.ByteSize() <= MAX_PAYLOAD_BYTES
        records = [ModelCallRecord.FromString(record.model_call) for record in batch.spans]
        assert {record.usable for record in records} == {one.trainable}
        seeds += [json.loads(record.request_json)["seed"] for record in records]
    assert seeds == list(range(8))


def test_a_call_of_many_large_choices_is_spread_over_chunks_and_counts_once() -> None:
    choices = [{"index": i, "message": {}, "token_ids": [i], "finish_reason": "stop",
                "logprobs": {"content": [{"logprob": -1}]}} for i in range(10)]  # fmt: skip
    document = {"choices": choices, "prompt_token_ids": [1], "usage": {"completion_tokens": 10}}
    call = finished({"messages": "m" * 500_000}, collected_of(document), place=SpanPlace(
        trace_id="1" * 32, span_id="2" * 16, parent_id="3" * 16, flags="01"))  # fmt: skip
    packed = CODEC.pack([CODEC.encode(call)])
    assert len(packed) > 1
    assert [one.calls for one in packed] == [0] * (len(packed) - 1) + [1]
    assert all(one.trainable for one in packed)
    assert sum(len(batch.spans) for batch in batches(packed)) == 10
