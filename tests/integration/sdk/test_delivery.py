"""What agents emit arrives: from inside the runner, from a command, from a shell, and though the store is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.ids import trace_id_of
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import span_service_pb2, span_service_pb2_grpc
from fulmen_service_kit.security.tokens import Role
from tests.support.runner.fixtures import PublishAgent, StartRunner, proxy, publish_agent, start_runner
from tests.support.runner.harness import rollouts_of, token
from tests.support.runner.stores import Ended, RealStore

__all__ = ["proxy", "publish_agent", "start_runner"]

DEADLINE_S = 40.0
BEFORE, DURING = 40, 700

EMIT = """
import time
from pathlib import Path
import fulmen

def emit(task):
    folder = Path(task["folder"])
    for number in range(task["before"]):
        fulmen.emit_annotation({"number": number})
    folder.joinpath("begun").touch()
    while not folder.joinpath("store is dead").exists():
        time.sleep(0.02)
    for number in range(task["during"]):
        fulmen.emit_annotation({"number": task["before"] + number})
    folder.joinpath("emitted").touch()
    return 1.0
"""
COMMAND = """
import json, os
import fulmen
from emit import emit
with fulmen.operation("all") as everything:
    emit(json.loads(os.environ["FULMEN_TASK"]))
fulmen.emit_reward({"style": 0.5, "reward": 1}, span=everything)
fulmen.emit_reward(0.25, step=2)
fulmen.emit_reward(2)
"""
SHELL = """
set -e
fulmen emit reward -0.5 --dimension style --step 1
fulmen emit reward 1 --no-trace
fulmen emit annotation phase=plan tries=3
fulmen emit message "no such file" --role tool
"""


@pytest_asyncio.fixture
async def store(database_url: str) -> AsyncIterator[RealStore]:
    """Yields the real store, in a process that can be killed."""
    async with RealStore(database_url) as real:
        yield real


async def spans_of(store: RealStore, name: str) -> list[Span]:
    """Reads all spans of a rollout."""
    async with open_channel(store.target, token=token(Role.CLIENT)) as channel:
        stub = span_service_pb2_grpc.SpanServiceStub(channel)
        spans: list[Span] = []
        page_token = ""
        while True:
            request = span_service_pb2.ListSpansRequest(parent=name, page_size=1000, page_token=page_token)
            page = await stub.ListSpans(request)
            spans += [Span.FromString(entry.span.otlp_span) for entry in page.spans]
            page_token = page.next_page_token
            if not page_token:
                return spans


def numbers_of(spans: list[Span]) -> list[int]:
    pairs = (pair for span in spans if span.name == "fulmen.annotation" for pair in span.attributes)
    return sorted(pair.value.int_value for pair in pairs if pair.key == "number")


async def reached(path: Path) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not path.exists():  # noqa: ASYNC110  # Another process makes it.
            await asyncio.sleep(0.02)


async def killed_meanwhile(store: RealStore, folder: Path, create: Callable[[], Awaitable[list[str]]]) -> Ended:
    """Runs one rollout while the store is killed and comes back on the same port."""
    [name] = await create()
    await reached(folder / "begun")
    await store.kill()
    (folder / "store is dead").touch()
    await reached(folder / "emitted")
    await store.revive()
    ended = (await store.ended([name]))[name]
    assert [attempt.kind for attempt in ended] == [""], ended
    return ended[0]


@pytest.mark.parametrize("kind", ["python", "command"])
async def test_a_store_that_is_killed_loses_and_doubles_nothing_that_agents_emit(
    store: RealStore, start_runner: StartRunner, publish_agent: PublishAgent, tmp_path: Path, kind: str
) -> None:
    entry = {"python": "emit.py:emit"} if kind == "python" else {"command": ("python", "command.py")}
    agent = await publish_agent({"emit.py": EMIT, "command.py": COMMAND}, **entry)
    await start_runner()
    task = {"folder": str(tmp_path), "before": BEFORE, "during": DURING}
    ended = await killed_meanwhile(store, tmp_path, lambda: store.create(rollouts_of(agent, [task])))
    spans = await spans_of(store, ended.attempt.partition("/attempts/")[0])
    assert numbers_of(spans) == list(range(BEFORE + DURING))
    if kind == "python":
        assert ended.rewards == {("reward", None): 1.0}
        return
    named = {span.name: span for span in spans}
    assert {span.parent_span_id for span in spans if span.name == "fulmen.annotation"} == {named["all"].span_id}
    assert {span.trace_id.hex() for span in spans} == {trace_id_of(ended.attempt)}
    assert sorted(span.name for span in spans if span.name == "fulmen.reward") == ["fulmen.reward"] * 4
    assert ended.rewards[("reward", 2)] == 0.25


async def test_a_shell_emits_by_the_command_line(
    store: RealStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    agent = await publish_agent({"agent.sh": SHELL}, command=("bash", "agent.sh"))
    await start_runner()
    [name] = await store.create(rollouts_of(agent, [{}]))
    [ended] = (await store.ended([name]))[name]
    assert (ended.message, ended.rewards) == ("", {("style", 1): -0.5, ("reward", None): 1.0})
    spans = await spans_of(store, name)
    assert sorted(span.name for span in spans) == ["fulmen.annotation", "fulmen.message", "fulmen.reward"]
    assert len({span.parent_span_id for span in spans}) == 1


async def test_an_attempt_is_not_complete_before_its_spans_are(
    store: RealStore, start_runner: StartRunner, publish_agent: PublishAgent, tmp_path: Path
) -> None:
    agent = await publish_agent({"emit.py": EMIT}, python="emit.py:emit")
    runner = await start_runner(flush_s=1.0, agents_otlp_url="http://127.0.0.1:9")
    (tmp_path / "store is dead").touch()
    task = {"folder": str(tmp_path), "before": 1, "during": 1}
    [name] = await store.create(rollouts_of(agent, [task], max_attempts=1))
    [ended] = (await store.ended([name]))[name]
    assert (ended.kind, "2 spans" in ended.message) == ("INFRA", True)
    assert (await runner.logged("spans_not_acknowledged"))["count"] == 2
