"""What emitters write into the trace of their attempt."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import fulmen
from fulmen.agent import begin_step, require_current
from fulmen.spans.recorded import MAX_CONTENT_CHARS, MAX_DEPTH, json_text

KEY = "the-key-of-the-attempt"


def only(spans: InMemorySpanExporter) -> tuple[str, dict[str, object]]:
    [span] = spans.get_finished_spans()
    return span.name, dict(span.attributes or {})


def test_a_reward_is_a_span_in_the_words_of_the_conventions(spans: InMemorySpanExporter) -> None:
    fulmen.emit_reward(0.5, dimension="style", step=3)
    assert only(spans) == (
        "fulmen.reward",
        {"gen_ai.evaluation.name": "style", "gen_ai.evaluation.score.value": 0.5, "fulmen.step": 3},
    )


def test_several_dimensions_at_once_or_none(spans: InMemorySpanExporter) -> None:
    fulmen.emit_reward({"style": 0.5, "exact": 1})
    with pytest.raises(fulmen.RewardInvalid):
        fulmen.emit_reward({"good": 1, "Bad": 1})
    with pytest.raises(fulmen.RewardInvalid, match="not both"):
        fulmen.emit_reward({"good": 1}, dimension="style")
    assert require_current().rewards == {("style", None, b""): 0.5, ("exact", None, b""): 1.0}
    assert len(spans.get_finished_spans()) == 2


@pytest.mark.parametrize("way", ["current", "span", "context", "operation", "bytes", "hex"])
def test_a_reward_scores_a_span_however_it_is_named(spans: InMemorySpanExporter, way: str) -> None:
    with fulmen.operation("plan") as plan:
        span = trace.get_current_span()
        context = span.get_span_context()
        span_id = context.span_id.to_bytes(8, "big")
        ways = {"span": span, "context": context, "operation": plan, "bytes": span_id, "hex": span_id.hex()}
        fulmen.emit_reward(1, span=ways.get(way, way))
    assert require_current().rewards == {("reward", None, span_id): 1.0}
    reward = spans.get_finished_spans()[0]
    assert reward.attributes["fulmen.reward.span_id"] == span_id.hex()
    assert [link.context.span_id for link in reward.links] == [context.span_id]
    assert reward.parent.span_id == context.span_id


@pytest.mark.parametrize("span", [b"1", b"\0" * 8, "xyz", 5, "current"])
def test_what_names_no_span_is_refused(spans: InMemorySpanExporter, span: object) -> None:
    with pytest.raises(fulmen.RewardInvalid):
        fulmen.emit_reward(1, span=span)
    assert not require_current().rewards
    assert not spans.get_finished_spans()


def test_annotations_keep_what_a_span_can_hold(spans: InMemorySpanExporter) -> None:
    fulmen.emit_annotation({"tries": 3, "ok": True, "share": 0.5, "plan": ["a", {"b": None}], "huge": 2**70})
    assert only(spans) == (
        "fulmen.annotation",
        {"tries": 3, "ok": True, "share": 0.5, "plan": '["a", {"b": null}]', "huge": str(2**70)},
    )


def test_messages_objects_and_exceptions(spans: InMemorySpanExporter) -> None:
    @dataclass
    class Plan:
        steps: list[str]
        secret: str = field(default="x", repr=False)

    fulmen.emit_message("hello", role="user", attributes={"to": "critic"})
    fulmen.emit_object(Plan(["a"]), name="plan")
    try:
        raise ValueError("no such file")
    except ValueError as error:
        fulmen.emit_exception(error)
    message, thing, failure = spans.get_finished_spans()
    assert (message.name, dict(message.attributes)) == (
        "fulmen.message",
        {"to": "critic", "fulmen.message.role": "user", "fulmen.message.content": "hello"},
    )
    assert thing.attributes["fulmen.object.json"] == '{"steps": ["a"]}'
    assert thing.attributes["fulmen.object.type"].endswith("Plan")
    assert (failure.name, failure.status.description) == ("fulmen.exception", "ValueError: no such file")
    [event] = failure.events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == "ValueError"
    assert "test_emitters.py" in event.attributes["exception.stacktrace"]


def test_a_step_of_a_generator_is_on_every_span(spans: InMemorySpanExporter) -> None:
    begin_step(4)
    try:
        fulmen.emit_annotation({})
        fulmen.emit_reward(1, step=2)
    finally:
        begin_step(None)
    assert [span.attributes["fulmen.step"] for span in spans.get_finished_spans()] == [4, 2]


def test_large_texts_are_cut_and_say_so(spans: InMemorySpanExporter) -> None:
    fulmen.emit_message("x" * 100_000)
    _, attributes = only(spans)
    assert len(attributes["fulmen.message.content"]) == MAX_CONTENT_CHARS
    assert attributes["fulmen.truncated"] is True


@pytest.mark.parametrize("offset", [0, MAX_CONTENT_CHARS - len(KEY) - 2, MAX_CONTENT_CHARS - 5, MAX_CONTENT_CHARS])
def test_the_attempts_key_is_in_no_text(spans: InMemorySpanExporter, offset: int) -> None:
    text = f"{'x' * offset}{KEY} and {KEY}"
    fulmen.emit_message(text)
    fulmen.emit_object({"header": text})
    written = json.dumps([dict(span.attributes) for span in spans.get_finished_spans()])
    assert KEY[:6] not in written


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=30,
)


@settings(deadline=None)
@given(VALUES)
def test_any_value_becomes_a_bounded_text(value: object) -> None:
    text, was_cut = json_text(value)
    assert len(text) <= MAX_CONTENT_CHARS
    if not was_cut:
        json.loads(text)


def test_vast_and_endless_values_are_cut() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert json_text(endless) == ("[" * MAX_DEPTH + '"list"' + "]" * MAX_DEPTH, True)
    nested: object = 1
    for _ in range(MAX_DEPTH - 1):
        nested = [nested] * 250
    text, was_cut = json_text(nested)
    assert was_cut
    assert len(text) <= MAX_CONTENT_CHARS
    assert json_text(10**5000)[1] is False
    assert json_text(object()) == ('"object"', False)


OUTSIDE = """
import fulmen
fulmen.emit_annotation({"a": 1})
fulmen.emit_message("hello")
fulmen.emit_object([1])
fulmen.emit_exception(ValueError("x"))
with fulmen.operation("plan"):
    pass
assert fulmen.flush() == 0
try:
    fulmen.emit_reward(1)
except fulmen.NotInAttempt:
    print("refused")
"""


def test_outside_of_an_attempt_only_rewards_are_refused() -> None:
    ran = subprocess.run([sys.executable, "-c", OUTSIDE], capture_output=True, text=True, timeout=30, check=False)
    assert (ran.stdout, ran.stderr) == ("refused\n", "")


def test_importing_fulmen_brings_nothing_along() -> None:
    script = (
        "import fulmen, sys; fulmen.emit_reward; print([m for m in sys.modules if m.startswith(('grpc', 'opent'))])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert ran.stdout == "[]\n"


def test_every_name_of_the_package_is_there() -> None:
    assert all(getattr(fulmen, name) is not None for name in fulmen.__all__)
    assert set(fulmen.__all__) <= set(dir(fulmen))
    with pytest.raises(AttributeError):
        _ = fulmen.no_such_name
