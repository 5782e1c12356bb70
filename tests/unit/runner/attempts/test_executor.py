"""One attempt from assignment to outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fulmen.ids import span_id_of, trace_id_of
from fulmen_runner.agents.environment import expanded_environment
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.errors import AgentFailed, ProgramUnavailable
from fulmen_runner.attempts.executor import STOPPED, AttemptExecutor, traced
from fulmen_runner.attempts.masking import MASKED
from fulmen_runner.attempts.outcome import MAX_MESSAGE_BYTES, Failed, FailureKind, Outcome, Succeeded
from fulmen_runner.attempts.program import Answer, Invocation, Program
from fulmen_runner.attempts.rewards import reward_of_number
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.attempts.workspace import Workspaces
from tests.support.runner.assignments import assignment
from tests.support.runner.captures import Captures, all_acknowledged
from tests.support.service_kit.own_traces import KeptTraces, parent_of

Body = Callable[[Invocation], Awaitable[object]]


class HandedOut:
    """Programs: one for everybody."""

    def __init__(self, body: Body, *, failure: Exception | None = None) -> None:
        self._body, self._failure = body, failure

    async def prompts(self, assignment: Assignment) -> dict[str, str]:
        return {}

    async def secrets(self, assignment: Assignment) -> dict[str, str]:
        return {}

    async def resolve(self, assignment: Assignment) -> Program:
        if self._failure is not None:
            raise self._failure
        return Program(agent=self, grader=None, environment={"OPENAI_API_KEY": "overridden", "OWN": "1"})

    async def run(self, invocation: Invocation) -> Answer:
        value = await self._body(invocation)
        return Answer(value=value, rewards=reward_of_number(value))


def executor(
    body: Body, *, flush_spans: Callable[[str], Awaitable[int]] | None = None, **more: object
) -> AttemptExecutor:
    return AttemptExecutor(
        captures=more.pop("captures", Captures()),
        programs=HandedOut(body, **more),
        stragglers=Stragglers(),
        environment_of=lambda item: {"OPENAI_API_KEY": item.attempt_key},
        expand_environment=expanded_environment,
        workspaces=Workspaces(),
        flush_spans=flush_spans or all_acknowledged,
    )


async def one(_: Invocation) -> object:
    return 1


async def test_the_attempts_environment_goes_before_the_publishers() -> None:
    seen = {}

    async def look(invocation: Invocation) -> object:
        seen.update(invocation.context.environment)
        return 1

    await executor(look).execute(assignment(key="the-key"))
    assert seen == {"OPENAI_API_KEY": "the-key", "OWN": "1"}


def failing(message: str) -> Body:
    async def body(_: Invocation) -> object:
        raise AgentFailed(message)

    return body


async def test_messages_hold_no_key_and_are_cut_at_the_front() -> None:
    outcome = await executor(failing("begin" + "x" * 9000 + "secret-key end")).execute(assignment(key="secret-key"))
    assert isinstance(outcome, Failed)
    assert outcome.message.endswith(f"{MASKED} end")
    assert len(outcome.message.encode()) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"captures": Captures(reachable=False)}, FailureKind.INFRA),
        ({"captures": Captures(confirms=False)}, FailureKind.INFRA),
        ({"failure": ProgramUnavailable("store away")}, FailureKind.INFRA),
        ({"failure": AgentFailed("no such agent")}, FailureKind.AGENT_ERROR),
        ({"failure": RecursionError()}, FailureKind.AGENT_ERROR),
    ],
)
async def test_failures_around_the_agent(more: dict[str, object], kind: FailureKind) -> None:
    outcome = await executor(one, **more).execute(assignment())
    assert isinstance(outcome, Failed)
    assert outcome.kind is kind


async def test_what_nests_too_deeply_to_be_handled_is_the_agents_error_and_not_tried_again() -> None:
    async def nested(_: Invocation) -> object:
        raise RecursionError

    outcome = await executor(nested).execute(assignment())
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.message) == (
        FailureKind.AGENT_ERROR,
        "agent's files, input or outcome are nested too deeply",
    )


async def test_a_cancelled_attempt_stops_its_agent() -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    async def wait(_: Invocation) -> object:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    task: asyncio.Task[Outcome] = asyncio.create_task(executor(wait).execute(assignment()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped.is_set()


async def test_what_ignores_its_cancellation_is_counted_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulmen_runner.attempts.executor.STOP_TIMEOUT_S", 0.05)
    let_go = asyncio.Event()

    async def stubborn(_: Invocation) -> object:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return 1

    subject, changed = executor(stubborn), asyncio.Event()
    subject.stragglers.on_change = changed.set
    outcome = await subject.execute(assignment(timeout_s=0.05))
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT
    assert len(subject.stragglers) == 1
    let_go.set()
    await changed.wait()
    assert len(subject.stragglers) == 0


async def test_an_attempt_whose_spans_were_not_acknowledged_is_not_complete() -> None:
    async def two_missing(_: str) -> int:
        return 2

    outcome = await executor(one, flush_spans=two_missing).execute(assignment())
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.INFRA
    assert "2 spans" in outcome.message


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Succeeded(rewards=()), None),
        (Failed(kind=FailureKind.TIMEOUT, message="It said: secret-word."), FailureKind.TIMEOUT.value),
    ],
)
async def test_an_attempt_that_was_run_is_below_the_attempt_as_a_whole(outcome: Outcome, error: str | None) -> None:
    kept, item = KeptTraces(), assignment()

    async def execute(_: Assignment) -> Outcome:
        return outcome

    assert await traced(execute, kept.traces, host="host-7")(item) is outcome
    [span] = kept.spans
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == trace_id_of(item.attempt)
    assert parent_of(span) == span_id_of(item.attempt)
    assert span.status.description == error
    assert span.attributes is not None
    assert span.attributes["host.name"] == "host-7"
    assert "secret-word" not in span.to_json()
    assert item.attempt_key not in span.to_json()


async def test_the_span_of_a_stopped_attempt_has_the_error_stopped() -> None:
    kept, began = KeptTraces(), asyncio.Event()

    async def execute(_: Assignment) -> Outcome:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(traced(execute, kept.traces, host="h")(assignment()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [span] = kept.spans
    assert span.status.description == STOPPED
