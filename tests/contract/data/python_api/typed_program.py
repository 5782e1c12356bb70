"""A program on the Python API, which type checkers accept as it is: `assert_type` says what they must find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import fulmen
from fulmen.client.aio.runs import AsyncRun
from fulmen.client.resources import Model, Resource
from fulmen.client.rollouts import Attempt, Rollout
from fulmen.client.runs import Step
from fulmen.client.sync.runs import Run
from fulmen.client.traces import Span, Trace
from fulmen.store.v1 import rollout_pb2


def solve(task: dict[str, Any]) -> str:
    return str(task["input"])


def program(client: fulmen.Client) -> None:
    run = client.train(
        agent=solve,
        reward="grader.py:grade",
        tasks=[{"input": 1}],
        algorithm=fulmen.GRPO(steps=40, group_size=8, loss={"kind": "gspo"}),
        name="typed",
    )
    assert_type(run, Run)
    for step in run:
        assert_type(step, Step)
        assert_type(step.reward, float | None)
    assert_type(run.model(), Model)
    assert_type(run.wait(), Run)
    assert_type(client.publish_agent("typed", ["node", "agent.js"]), Resource)
    rollouts = client.rollouts.wait(client.rollouts.create("typed", {"input": 1}), timeout_s=1.0)
    assert_type(rollouts, list[Rollout])
    assert_type(rollouts[0].attempt, Attempt | None)
    assert_type(rollouts[0].proto, rollout_pb2.Rollout)
    assert_type(client.spans.list(rollouts[0]), Iterator[Span])
    assert_type([each.state for each in run.rollouts(filter="mode = TRAIN")], list[str])


async def asynchronous_program(client: fulmen.AsyncClient) -> None:
    run = await client.train(agent=solve, tasks="tasks.csv", algorithm="sft")
    assert_type(run, AsyncRun)
    async for step in run:
        assert_type(step, Step)
    assert_type(await client.spans.trace("0192f0c1-7a6e-7c53-9f3e-0123456789ab"), Trace)
    assert_type([each async for each in client.runs.list()], list[AsyncRun])


def with_one_connection() -> None:
    with fulmen.local() as client:
        assert_type(client.aio, fulmen.AsyncClient)


def refused(client: fulmen.Client) -> None:
    fulmen.GRPO(stepz=40)  # type: ignore[call-arg]  # no such setting
    fulmen.GRPO(steps="many")  # type: ignore[arg-type]  # a setting of another type
    client.rollouts.get(3)  # type: ignore[arg-type]  # no name
