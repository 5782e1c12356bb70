"""An agent cannot write to another rollout: by rpc, by spans, by its environment or its SDK, from any kind of agent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from fulmen.rpc.channel import open_channel
from fulmen.runner.v1.agent_spec_pb2 import Isolation
from fulmen_service_kit.security.tokens import Role
from tests.support.runner.fixtures import World
from tests.support.runner.fleet import stored_spans
from tests.support.runner.harness import rollouts_of, token
from tests.support.runner.stores import RealStore

OWN, FORGED, VICTIMS = 0.5, 99.0, 0.25

AGENT = """
import asyncio, json, os, sys
from pathlib import Path
import grpc
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from fulmen import emit_reward
from fulmen.ids import trace_id_of
from fulmen.store.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from fulmen.store.v1 import rollout_service_pb2, rollout_service_pb2_grpc

async def waits(task):
    while not Path(task["gate"]).exists():
        await asyncio.sleep(0.05)
    return 0.25

def by_rpc(target, key, victim):
    "Says what came of every rpc that could change the victim, asked with the attempt's own key."
    attempt = victim + "/attempts/1"
    result = lease_pb2.AttemptResult(attempt=attempt, epoch=1)
    result.rewards.add(dimension="reward", value=99)
    span = trace_service_pb2.ExportTraceServiceRequest()
    forged = span.resource_spans.add().scope_spans.add().spans.add(
        name="forged", trace_id=bytes.fromhex(trace_id_of(victim)), span_id=b"12345678",
        start_time_unix_nano=1, end_time_unix_nano=2)
    forged.attributes.add(key="fulmen.rollout").value.string_value = victim
    forged.attributes.add(key="fulmen.attempt").value.int_value = 1
    codes = {}
    with grpc.insecure_channel(target) as channel:
        leases = lease_service_pb2_grpc.LeaseServiceStub(channel)
        rollouts = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        calls = {
            "complete": (leases.CompleteAttempts, lease_service_pb2.CompleteAttemptsRequest(results=[result])),
            "release": (leases.ReleaseLeases, lease_service_pb2.ReleaseLeasesRequest(runner="x")),
            "cancel": (rollouts.CancelRollouts, rollout_service_pb2.CancelRolloutsRequest(names=[victim])),
            "create": (rollouts.BatchCreateRollouts, rollout_service_pb2.BatchCreateRolloutsRequest()),
            "spans": (trace_service_pb2_grpc.TraceServiceStub(channel).Export, span),
        }
        for name, (call, request) in calls.items():
            try:
                answer = call(request, metadata=(("authorization", "Bearer " + key),), timeout=30)
                codes[name] = "OK"
                if name == "spans":
                    codes[name] = str(answer.partial_success.rejected_spans)
            except grpc.RpcError as error:
                codes[name] = error.code().name
    return codes

def in_python(task, context):
    os.environ["FULMEN_ROLLOUT"], os.environ["FULMEN_ATTEMPT"] = task["victim"], "1"
    os.environ["FULMEN_REWARDS_FILE"] = task["file"]
    emit_reward(0.75, dimension="mine")
    with trace.get_tracer("hostile").start_as_current_span("forged") as span:
        span.set_attribute("fulmen.rollout", task["victim"])
        span.set_attribute("fulmen.attempt", 1)
    emit_reward(0.5)
    return by_rpc(task["store"], os.environ["OPENAI_API_KEY"], task["victim"])

async def in_the_loop(task, context):
    return in_python(task, context)

if __name__ == "__main__":
    task = json.load(sys.stdin)
    said = by_rpc(task["store"], os.environ["OPENAI_API_KEY"], task["victim"])
    os.environ["FULMEN_ROLLOUT"] = task["victim"]
    emit_reward(0.75, dimension="mine", trace=False)
    emit_reward(0.5, trace=False)
    Path(task["said"]).write_text(json.dumps(said))
"""


@pytest_asyncio.fixture
async def store(database_url: str) -> AsyncIterator[RealStore]:
    """Yields a store with everything that guards it."""
    async with RealStore(database_url) as real:
        yield real


async def test_whatever_an_agent_writes_is_its_own(world: World, tmp_path: Path) -> None:
    files = {"agent.py": AGENT}
    waits = await world.publish(files, python="agent.py:waits")
    attackers = {
        "async": await world.publish(files, python="agent.py:in_the_loop"),
        "plain": await world.publish(files, python="agent.py:in_python"),
        "child": await world.publish(files, python="agent.py:in_python", isolation=Isolation.ISOLATION_PROCESS),
        "command": await world.publish(files, command=("python", "agent.py")),
    }
    gate = tmp_path / "gate"
    victims = await world.store.create(rollouts_of(waits, [{"gate": str(gate)}] * len(attackers), max_attempts=1))
    await world.start(slots=2 * len(attackers), work_dir=str(tmp_path))
    names = {}
    for (kind, agent), victim in zip(attackers.items(), victims, strict=True):
        task = {
            "victim": victim,
            "store": world.store.target,
            "file": str(tmp_path / kind),
            "said": str(tmp_path / "said"),
        }
        [names[kind]] = await world.store.create(rollouts_of(agent, [task], max_attempts=1))
    ended = await world.store.ended(list(names.values()))
    gate.touch()
    of_victims = await world.store.ended(victims)
    for kind, name in names.items():
        [attempt] = ended[name]
        assert (kind, attempt.message, attempt.rewards) == (
            kind,
            "",
            {("reward", None): OWN, ("mine", None): 0.75},
        )
        said = json.loads(attempt.output if kind != "command" else (tmp_path / "said").read_text())
        # A span that names another's attempt is refused.
        assert (kind, said.pop("spans")) == (kind, "1")
        assert said == dict.fromkeys(("complete", "release", "cancel", "create"), "PERMISSION_DENIED")
    for victim in victims:
        [attempt] = of_victims[victim]
        assert (attempt.message, attempt.rewards) == ("", {("reward", None): VICTIMS})
    async with open_channel(world.store.target, token=token(Role.CLIENT)) as channel:
        spans = await stored_spans(channel, [f"{name}/attempts/1" for name in (*victims, *names.values())])
    stored = {name.partition("/attempts/")[0]: [each for each, _ in found] for name, found in spans.items()}
    assert stored.keys().isdisjoint(victims)
    assert [stored.get(names[kind], []).count("forged") for kind in attackers] == [1, 1, 1, 0]
