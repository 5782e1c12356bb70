"""Agents that are not Python callables, each doing one rollout through runner, proxy, engine and store."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.store.v1 import rollout_pb2, span_pb2, span_service_pb2
from fulmen.train_toml.train import AgentConfig
from tests.support.algorithm.runs import create_rollouts, ended_rollout, publish_agent
from tests.support.end_to_end import World

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

AGENTS = Path(__file__).parent / "agents"


@pytest.mark.long(short=True)
async def test_a_command_in_node_does_a_rollout_with_the_served_model(world, main_job, repository_root):
    """The main job has left its policy served under the name that the agent calls."""
    agent = AgentConfig(command=("node", "agent.mjs"), grader_command=("node", "grader.mjs"))
    version = await publish_agent(world.client, repository_root / "examples/node_echo", "node-echo", agent)
    task = {"input": {"question": "12+34="}, "answer": "46"}

    [name] = await create_rollouts(world.client, version, [json.dumps(task).encode()])
    rollout = await ended_rollout(world.client, name)

    assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED, rollout
    [attempt] = rollout.attempts
    assert [reward.value for reward in attempt.rewards] in ([0.0], [1.0])
    [captured] = [each for each in await spans_of(world, name) if each.span.model_call]
    assert captured.attempt == attempt.name


async def test_an_opentelemetry_exporter_lands_its_spans_in_the_attempt_of_its_key(world):
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
    # The span that names another rollout is refused, and lands nowhere.
    assert "look-up" in by_name
    assert "plan" not in by_name
    plans = [span for span in (decoded(each.span) for each in await spans_of(world, other)) if span.name == "plan"]
    assert len(plans) == 1


async def spans_of(world: World, parent: str) -> list[span_service_pb2.AttemptSpan]:
    answer = await world.client.spans.ListSpans(span_service_pb2.ListSpansRequest(parent=parent, page_size=1000))
    return list(answer.spans)


def decoded(record: span_pb2.SpanRecord) -> Span:
    return Span.FromString(record.otlp_span)
