"""How Python callables are called, and what becomes of what they return or raise."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import numpy as np
import pytest
import pytest_asyncio

from fulmen.agent import GRADER_AGENT, Context, acting_agent, entered
from fulmen.emit import emit_reward
from fulmen_runner.agents.python.host import PythonHost, python_agent, python_grader
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Succeeded
from fulmen_runner.attempts.program import Program
from fulmen_runner.attempts.workspace import Workspaces
from tests.support.runner.assignments import assignment, tracing_restored
from tests.support.runner.in_process import invocation_of, python_host

TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"
Function = Callable[..., object]


@pytest_asyncio.fixture
async def host() -> AsyncIterator[PythonHost]:
    with tracing_restored():
        async with python_host() as made:
            yield made


def program(host: PythonHost, agent: Function, grader: Function | None = None) -> Program:
    return Program(
        agent=python_agent(agent, host, graded=grader is not None),
        grader=python_grader(grader, host) if grader is not None else None,
        environment={},
    )


async def run(made: Program) -> Outcome:
    invocation = invocation_of(assignment(input_=b'{"question": "why"}'), Workspaces(), TRACEPARENT=TRACEPARENT)
    with entered(invocation.context):
        return await asyncio.create_task(made.run(invocation))


def rewards(outcome: Outcome) -> dict[tuple[str, int | None], float]:
    assert isinstance(outcome, Succeeded), outcome
    return {(reward.dimension, reward.step): reward.value for reward in outcome.rewards}


def steps(task: object):
    yield 0.5
    yield np.float32(0.25)
    return 2


async def async_steps(task: object, context: Context):
    yield 0.5
    emit_reward(7.0)
    yield float(context.step)


def only_steps(task: object):
    yield 1
    yield 3


async def returns_one(task: object) -> float:
    return 1.0


class Inherited:
    async def __call__(self, task: object) -> float:
        return 4.0


class Child(Inherited):
    pass


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (steps, {("reward", 0): 0.5, ("reward", 1): 0.25, ("reward", None): 2.0}),
        (async_steps, {("reward", 0): 0.5, ("reward", 1): 1.0, ("reward", None): 7.0}),
        (only_steps, {("reward", 0): 1.0, ("reward", 1): 3.0}),
        (partial(returns_one), {("reward", None): 1.0}),
        (lambda task: returns_one(task), {("reward", None): 1.0}),
        (lambda task: async_steps(task, Context(rollout="", attempt="", attempt_number=1, mode="", deadline=0)),
         {("reward", 0): 0.5, ("reward", 1): 1.0, ("reward", None): 7.0}),
        (Child(), {("reward", None): 4.0}),
    ],
)  # fmt: skip
async def test_every_kind_of_callable_runs(
    host: PythonHost, agent: Function, expected: dict[tuple[str, int | None], float]
) -> None:
    assert rewards(await run(program(host, agent))) == expected


def exits(task: object) -> None:
    sys.exit("no more")


def interrupts(task: object) -> None:
    raise KeyboardInterrupt


def stops(task: object) -> None:
    raise StopIteration


async def async_exits(task: object) -> None:
    sys.exit("no more")


async def steps_then_raises(task: object):
    yield 1
    raise OSError("away")


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        (exits, "SystemExit: no more"),
        (async_exits, "SystemExit: no more"),
        (interrupts, "KeyboardInterrupt"),
        (stops, "StopIteration"),
        (steps_then_raises, "OSError: away"),
    ],
)
async def test_whatever_an_agent_raises_ends_its_own_attempt_only(host: PythonHost, agent: Function, says: str) -> None:
    with pytest.raises(AgentFailed, match=says):
        await run(program(host, agent))


async def outcome_of(task: object) -> str:
    emit_reward(0.125, dimension="format")
    return "because"


def with_context(task: dict[str, str], outcome: str, context: Context) -> dict[str, float]:
    assert acting_agent() == GRADER_AGENT
    return {"exact": task["question"] == "why", "emitted": context.rewards["format", None, b""]}


async def with_ctx(task: object, outcome: str, ctx: Context | None = None) -> float:
    assert ctx is not None
    return np.float64(0.75)


def with_an_option(task: object, outcome: str, strict: bool = False) -> bool:
    return not strict


@pytest.mark.parametrize(
    ("grader", "expected"),
    [
        (with_context, {("exact", None): 1.0, ("emitted", None): 0.125}),
        (with_ctx, {("reward", None): 0.75}),
        (with_an_option, {("reward", None): 1.0}),
    ],
)
async def test_graders_may_ask_for_the_context(
    host: PythonHost, grader: Function, expected: dict[tuple[str, int | None], float]
) -> None:
    assert rewards(await run(program(host, outcome_of, grader))) == {("format", None): 0.125} | expected
    assert acting_agent() == ""


@pytest.mark.parametrize(
    ("grader", "says"),
    [
        (lambda task, outcome: 1 / 0, "grader failed.*ZeroDivisionError"),
        (lambda task, outcome: math.nan, "grader failed.*finite"),
        (lambda task, outcome: {"exact": math.inf}, "grader failed.*'exact' is inf"),
        (lambda task, outcome: "good", "grader failed.*not str"),
        (lambda task, outcome: np.zeros(2), "grader failed.*not ndarray"),
    ],
)
async def test_a_grader_that_fails_is_named(host: PythonHost, grader: Function, says: str) -> None:
    with pytest.raises(AgentFailed, match=f"(?s){says}"):
        await run(program(host, outcome_of, grader))


async def test_a_grader_that_returns_nothing_is_a_missing_reward(host: PythonHost) -> None:
    outcome = await run(program(host, lambda task: "text", lambda task, outcome: None))
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.REWARD_MISSING
    assert "its grader returned no reward" in outcome.message


async def test_an_array_that_an_agent_returns_is_no_reward(host: PythonHost) -> None:
    outcome = await run(program(host, lambda task: np.zeros(2)))
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.REWARD_MISSING


async def test_a_blocking_agent_that_is_stopped_is_counted_until_it_ends(host: PythonHost) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def blocks(task: object) -> None:
        begun.set()
        go_on.wait(30)

    changed = asyncio.Event()
    host.stragglers.on_change = changed.set
    task = asyncio.create_task(run(program(host, blocks)))
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(host.stragglers) == 1
    go_on.set()
    await changed.wait()
    assert len(host.stragglers) == 0
