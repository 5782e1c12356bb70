"""An attempt gets the secrets that its agent names, in its environment alone; nothing that it says shows them."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen.rpc.channel import open_channel
from fulmen.runner.v1.agent_spec_pb2 import AgentSpec, Isolation
from fulmen.store.v1 import secret_service_pb2 as pb
from fulmen.store.v1 import secret_service_pb2_grpc, span_service_pb2, span_service_pb2_grpc
from fulmen_service_kit.security.tokens import Role
from tests.support.runner.fixtures import World
from tests.support.runner.harness import bundle_of, spec_of, token
from tests.support.runner.stores import RealStore

VALUE = "sunny & warm/0123456789"
AGENT = """
import json, os, sys, time
def said():
    value = os.environ.get("WEATHER_KEY", "none")
    return {"value": value, "length": len(value), "all": sorted(name for name in os.environ if name.endswith("_KEY"))}
def solve(task):
    if task == "fail":
        raise RuntimeError("with " + said()["value"])
    return said()
def grade(task, outcome): return 1.0
if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps(said()))
    if task == "fail":
        sys.exit("with " + said()["value"])
"""
KINDS = {
    "command": {"command": (sys.executable, "agent.py")},
    "process": {"python": "agent.py:solve", "isolation": Isolation.ISOLATION_PROCESS},
    "runner": {"python": "agent.py:solve", "isolation": Isolation.ISOLATION_TRUSTED},
}


@pytest_asyncio.fixture
async def store(database_url: str) -> AsyncIterator[RealStore]:
    """Yields the real store: the double has no secrets."""
    async with RealStore(database_url) as running:
        yield running


async def set_secret(store: RealStore, value: str, name: str = "WEATHER_KEY") -> None:
    async with open_channel(store.target, token=token(Role.CLIENT)) as channel:
        stub = secret_service_pb2_grpc.SecretServiceStub(channel)
        await stub.SetSecret(pb.SetSecretRequest(name=name, value=value.encode()))


async def published(world: World, name: str, kind: str, *secrets: str) -> str:
    """Publishes an agent that names secrets."""
    assert isinstance(world.store, RealStore)
    bundle = await world.store.publish("bundle.tests", bundle_of({"agent.py": AGENT}))
    spec = AgentSpec.FromString(spec_of(bundle=bundle, python_grader="agent.py:grade", **KINDS[kind]))  # type: ignore[arg-type]
    spec.secrets.extend(secrets)
    return await world.store.publish(f"agent.{name}", spec.SerializeToString())


async def spans_of(store: RealStore, attempt: str) -> bytes:
    async with open_channel(store.target, token=token(Role.READER)) as channel:
        stub = span_service_pb2_grpc.SpanServiceStub(channel)
        answer = await stub.ListSpans(span_service_pb2.ListSpansRequest(parent=attempt))
    content: bytes = answer.SerializeToString()
    return content


@pytest.mark.parametrize("kind", KINDS)
async def test_an_attempt_gets_its_secret_and_others_do_not_and_nothing_shows_it(world: World, kind: str) -> None:
    assert isinstance(world.store, RealStore)
    await set_secret(world.store, VALUE)
    await set_secret(world.store, "an unnamed value", "UNNAMED_KEY")
    runner = await world.start()
    naming = await published(world, "naming", kind, "WEATHER_KEY")
    plain = await published(world, "plain", kind)

    ended = await world.run(naming, "succeed")
    other = await world.run(plain, "succeed")
    failed = await world.run(naming, "fail")
    again = await world.run(plain, "succeed")

    assert (ended.kind, ended.message) == ("", "")
    said = json.loads(ended.output)
    assert said["length"] == len(VALUE)
    assert said["value"] == "[masked]"
    assert "WEATHER_KEY" in said["all"]
    assert "UNNAMED_KEY" not in said["all"]
    for each in (other, again):
        assert json.loads(each.output)["value"] == "none"
        assert "WEATHER_KEY" not in json.loads(each.output)["all"]
    assert failed.kind == "AGENT_ERROR"
    assert "with [masked]" in failed.message
    spans = [await spans_of(world.store, each.attempt) for each in (ended, failed)]
    seen = [
        repr((ended, other, failed, again)),
        "\n".join(runner.tail),
        Path(f"/proc/{runner.pid}/environ").read_text(),
    ]
    assert not any(VALUE in text for text in seen)
    assert not any(VALUE.encode() in each for each in spans)


async def test_a_changed_secret_reaches_the_next_attempt(world: World) -> None:
    assert isinstance(world.store, RealStore)
    await set_secret(world.store, VALUE)
    await world.start()
    agent = await published(world, "naming", "process", "WEATHER_KEY")
    lengths = [json.loads((await world.run(agent, "succeed")).output)["length"]]
    await set_secret(world.store, VALUE + VALUE)
    lengths.append(json.loads((await world.run(agent, "succeed")).output)["length"])
    assert lengths == [len(VALUE), 2 * len(VALUE)]


async def test_an_agent_that_names_a_missing_secret_fails_once_before_it_starts(world: World) -> None:
    await world.start()
    agent = await published(world, "naming", "command", "WEATHER_KEY", "MAIL_PASSWORD")
    [[ended]] = await world.attempts(agent, ["succeed"])
    assert ended.kind == "AGENT_ERROR"
    assert "secrets that do not exist: MAIL_PASSWORD, WEATHER_KEY" in ended.message
    assert "fulmen secret set" in ended.message
