"""Agents that are not Python callables, each doing one rollout through runner, proxy, engine and store."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.store.v1 import rollout_pb2, span_pb2, span_service_pb2
from fulmen.train_config import AgentConfig
from tests.e2e.conftest import World
from tests.support.runs import (
    FINAL_RUN_STATES,
    create_rollouts,
    ended_rollout,
    eventually,
    publish_agent,
    read_run,
    start_run,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

AGENTS = Path(__file__).parent / "agents"
MODEL = "served"
RUN_DEADLINE_S = 300.0


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def served_model(world: World, world_folder: Path, repository_root: Path) -> str:
    """Trains for one step, after which the policy stays served; returns its public name."""
    folder = world_folder / MODEL
    folder.mkdir()
    for name in ("agent.py", "grader.py", "make_model.py"):
        shutil.copy(repository_root / "examples/arithmetic" / name, folder)
    agent = folder / "agent.py"
    agent.write_text(agent.read_text(encoding="utf-8").replace('"arithmetic"', f'"{MODEL}"'), encoding="utf-8")
    (folder / "tasks.jsonl").write_text('{"input": {"question": "1+1="}, "answer": "2"}\n', encoding="utf-8")
    (folder / "train.toml").write_text(
        f"""
        name = "{MODEL}"
        policy = {{name = "{MODEL}", build = "make_model.py:build"}}
        agent = {{python = "agent.py:solve", grader = "grader.py:grade"}}
        data = {{train = "tasks.jsonl"}}
        stage = [{{algorithm = "grpo", steps = 1, prompts_per_step = 1, group_size = 2, max_tokens = 5}}]
        """,
        encoding="utf-8",
    )
    run = await start_run(world.client, folder, MODEL)

    async def ended() -> training_run_pb2.TrainingRun | None:
        now = await read_run(world.client, run)
        return now if now.state in FINAL_RUN_STATES else None

    last = await eventually(ended, what=f"{run} ends", deadline_s=RUN_DEADLINE_S)
    assert last.state == training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED, last.failure_message
    return MODEL


async def test_a_command_in_node_does_a_rollout_with_the_served_model(
    world: World, served_model: str, repository_root: Path
) -> None:
    agent = AgentConfig(
        command=("node", "agent.mjs"), grader_command=("node", "grader.mjs"), environment={"MODEL": served_model}
    )
    version = await publish_agent(world.client, repository_root / "examples/node_echo", "node-echo", agent)
    task = {"input": {"question": "12+34="}, "answer": "46"}

    [name] = await create_rollouts(world.client, version, [json.dumps(task).encode()])
    rollout = await ended_rollout(world.client, name)

    assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED, rollout
    [attempt] = rollout.attempts
    assert [reward.value for reward in attempt.rewards] in ([0.0], [1.0])
    [captured] = [each for each in await spans_of(world, name) if each.span.model_call]
    assert captured.attempt == attempt.name


async def test_an_opentelemetry_exporter_lands_its_spans_in_the_attempt_of_its_key(world: World) -> None:
    version = await publish_agent(
        world.client, AGENTS / "otel", "otel", AgentConfig(command=(sys.executable, "agent.py"))
    )
    [other] = await create_rollouts(world.client, version, [b'{"id": "first", "forged_rollout": ""}'])
    await ended_rollout(world.client, other)
    task = {"id": "second", "forged_rollout": other}

    [name] = await create_rollouts(world.client, version, [json.dumps(task).encode()])
    rollout = await ended_rollout(world.client, name)

    assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED, rollout
    assert [reward.value for reward in rollout.attempts[0].rewards] == [1.0]
    spans = await spans_of(world, name)
    assert {each.attempt for each in spans} == {rollout.attempts[0].name}
    by_name = {span.name: span for span in (decoded(each.span) for each in spans)}
    assert {"plan", "look-up"} <= by_name.keys()
    assert by_name["look-up"].parent_span_id == by_name["plan"].span_id
    plans = [span for span in (decoded(each.span) for each in await spans_of(world, other)) if span.name == "plan"]
    assert len(plans) == 1


async def spans_of(world: World, parent: str) -> list[span_service_pb2.AttemptSpan]:
    answer = await world.client.spans.ListSpans(span_service_pb2.ListSpansRequest(parent=parent, page_size=1000))
    return list(answer.spans)


def decoded(record: span_pb2.SpanRecord) -> Span:
    return Span.FromString(record.otlp_span)
