"""Attempts in the operator's traces: which runner ran each, from when to when, and how it ended there."""

import time

from fulmen import attributes as names
from fulmen.ids import span_id_of, trace_id_of
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.executor import Execute
from fulmen_runner.attempts.outcome import Failed, Outcome
from fulmen_service_kit.own_traces import OwnTraces

STOPPED = "STOPPED"
"""How an attempt ended that was cancelled or given back, or whose lease was lost."""


def traced(execute: Execute, traces: OwnTraces, *, host: str) -> Execute:
    """Returns what runs an attempt and adds a span of it, below that of the attempt as a whole."""

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
