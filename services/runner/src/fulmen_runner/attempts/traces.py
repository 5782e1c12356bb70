"""Spans of attempts in the operator's traces: runner, duration and outcome."""

import time

from fulmen import attributes as names
from fulmen.ids import span_id_of, trace_id_of
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.executor import Execute
from fulmen_runner.attempts.outcome import Failed, Outcome
from fulmen_service_kit.own_traces import OwnTraces

STOPPED = "STOPPED"
"""Error of the span of an attempt that was cancelled or released, or lost its lease."""


def traced(execute: Execute, traces: OwnTraces, *, host: str) -> Execute:
    """Wraps `execute` to add a span of each run below the attempt's own span."""

    async def run(assignment: Assignment) -> Outcome:
        start_ns, ended = time.time_ns(), STOPPED
        try:
            outcome = await execute(assignment)
            ended = outcome.kind.value if isinstance(outcome, Failed) else ""
        finally:
            traces.add(
                "fulmen.runner.run",
                trace_id=trace_id_of(assignment.attempt),
                parent_id=span_id_of(assignment.attempt),
                start_ns=start_ns,
                attributes={
                    names.ROLLOUT: assignment.rollout,
                    names.ATTEMPT: assignment.number,
                    "fulmen.agent": assignment.agent,
                    "host.name": host,
                },
                error=ended,
            )
        return outcome

    return run
