"""Records read the messages of the contract through plain attributes."""

from __future__ import annotations

import datetime

import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.client.rollouts import Rollout
from fulmen.client.runs import Step
from fulmen.client.traces import Span, Trace
from fulmen.client.view import name_of
from fulmen.messages import enum_number
from fulmen.store.v1 import attempt_pb2, rollout_pb2, span_service_pb2

NAME = "projects/default/rollouts/0192f0c1-7a6e-7c53-9f3e-0123456789ab"


def finished() -> rollout_pb2.Rollout:
    rollout = rollout_pb2.Rollout(
        name=NAME,
        state=rollout_pb2.ROLLOUT_STATE_SUCCEEDED,
        mode=rollout_pb2.ROLLOUT_MODE_TEST,
        input=b'{"input": 1}',
    )
    rollout.attempts.add(name=f"{NAME}/attempts/1", state=attempt_pb2.ATTEMPT_STATE_FAILED)
    decided = rollout.attempts.add(name=f"{NAME}/attempts/2", final=True, output=b'"two"')
    decided.rewards.add(value=0.5)
    decided.rewards.add(dimension="style", value=0.25)
    decided.rewards.add(value=1.0, step=3)
    decided.start_time.FromMilliseconds(1_000)
    decided.end_time.FromMilliseconds(3_500)
    return rollout


def test_a_rollout_shows_what_its_deciding_attempt_did() -> None:
    rollout = Rollout(finished())

    assert (rollout.state, rollout.mode, rollout.is_final) == ("succeeded", "test", True)
    assert (rollout.task, rollout.output, rollout.reward) == ({"input": 1}, "two", 0.5)
    assert rollout.attempt is not None
    assert (rollout.attempt.number, rollout.attempt.duration_s) == (2, 2.5)
    assert rollout.attempt.rewards == {"reward": 0.5, "style": 0.25}
    assert rollout.attempt.start_time == datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
    assert repr(rollout) == f"Rollout(name='{NAME}', state='succeeded', reward=0.5)"


def test_what_a_list_leaves_out_is_none() -> None:
    listed = Rollout(rollout_pb2.Rollout(name=NAME, state=rollout_pb2.ROLLOUT_STATE_QUEUED))

    assert (listed.task, listed.output, listed.reward, listed.end_time) == (None, None, None, None)


def test_the_message_is_one_attribute_away_and_records_of_equal_ones_are_equal() -> None:
    assert Rollout(finished()) == Rollout(finished())
    assert Rollout(finished()).proto == finished()
    assert len({Rollout(finished()), Rollout(finished())}) == 1
    assert name_of(Rollout(finished())) == name_of(NAME) == NAME


def test_a_step_finds_the_validation_of_any_algorithm() -> None:
    step = Step(training_run_pb2.StepMetrics(step=4, values={"reward_mean": 0.5, "validation_pass_at_1": 0.75}))

    assert (step.number, step.reward, step.validation, step.loss) == (4, 0.5, 0.75, None)
    assert step["reward_mean"] == 0.5


def span(span_id: bytes, parent: bytes, name: str, *, attempt: int = 1) -> Span:
    otlp = trace_pb2.Span(span_id=span_id, parent_span_id=parent, name=name, end_time_unix_nano=2_000_000_000)
    record = span_service_pb2.AttemptSpan(attempt=f"{NAME}/attempts/{attempt}")
    record.span.otlp_span = otlp.SerializeToString()
    return Span(record)


def test_a_trace_is_a_tree_of_its_spans() -> None:
    root, child = span(b"\1" * 8, rb"\9" * 8, "root"), span(b"\2" * 8, b"\1" * 8, "child")
    trace = Trace(f"{NAME}/attempts/1", [root, child])

    assert [each.name for each in trace.roots] == ["root"]
    assert [each.name for each in trace.children(root)] == ["child"]
    assert (trace.rollout, child.duration_s, child.model_call) == (NAME, 2.0, None)


def reached(trace: Trace) -> list[str]:
    """Returns the names of what is below the roots, each as often as a way leads there."""
    names, waiting = [], list(reversed(trace.roots))
    while waiting:
        names.append((at := waiting.pop()).name)
        assert len(names) <= len(trace), "a way without an end"
        waiting += reversed(trace.children(at))
    return names


def test_spans_below_each_other_in_a_circle_are_reached_from_the_first_of_them_each_once() -> None:
    links = {"a": "c", "b": "a", "c": "b", "below": "b", "own": "own", "root": "", "leaf": "root"}
    spans = [span(name.encode(), parent.encode(), name) for name, parent in links.items()]

    trace = Trace(NAME, spans)

    assert [each.name for each in trace.roots] == ["a", "own", "root"]
    assert reached(trace) == ["a", "b", "c", "below", "own", "root", "leaf"]


def test_equal_ids_of_two_attempts_make_no_circle() -> None:
    spans = [span(b"a", b"", "a 1"), span(b"b", b"a", "b 1"), span(b"a", b"b", "a 2", attempt=2)]

    assert reached(Trace(NAME, spans)) == ["a 1", "b 1", "a 2"]


def test_an_unknown_word_lists_those_that_are_known() -> None:
    assert enum_number(rollout_pb2.RolloutState, "retry_wait") == rollout_pb2.ROLLOUT_STATE_RETRY_WAIT
    with pytest.raises(ValueError, match="known: train, validation, test"):
        enum_number(rollout_pb2.RolloutMode, "unspecified")
