"""What a runner adds to a rollout's trace."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.ids import span_id_of, trace_id_of
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Succeeded
from fulmen_runner.attempts.traces import STOPPED, traced
from tests.support.own_traces import KeptTraces, parent_of
from tests.support.runner.assignments import assignment as make_work


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Succeeded(rewards=()), None),
        (Failed(kind=FailureKind.TIMEOUT, message="It said: secret-word."), FailureKind.TIMEOUT.value),
    ],
)
async def test_an_attempt_that_was_run_is_below_the_attempt_as_a_whole(outcome: Outcome, told: str | None) -> None:
    kept, assignment = KeptTraces(), make_work()

    async def execute(_: Assignment) -> Outcome:
        return outcome

    assert await traced(execute, kept.traces, host="host-7")(assignment) is outcome
    [span] = kept.spans
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == trace_id_of(assignment.attempt)
    assert parent_of(span) == span_id_of(assignment.attempt)
    assert span.status.description == told
    assert span.attributes is not None
    assert span.attributes["host.name"] == "host-7"
    assert "secret-word" not in span.to_json()
    assert assignment.attempt_key not in span.to_json()


async def test_an_attempt_that_is_stopped_is_told_as_such() -> None:
    kept, began = KeptTraces(), asyncio.Event()

    async def execute(_: Assignment) -> Outcome:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(traced(execute, kept.traces, host="h")(make_work()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [span] = kept.spans
    assert span.status.description == STOPPED
