"""Concurrency never mixes rollouts: many agents of every kind at once in one process, each with its own identity."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anthropic
import httpx2
import openai
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fulmen.agent import entered
from fulmen.emit import emit_reward
from fulmen.ids import trace_id_of
from fulmen_runner.agents.environment import PLACEHOLDER_KEY, Endpoints
from fulmen_runner.agents.python.host import PythonHost, python_agent
from fulmen_runner.agents.python.preparation import prepare_process
from fulmen_runner.agents.tracing.spans import AttemptSpanProcessor, add_span_processor
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.outcome import Succeeded
from fulmen_runner.attempts.program import Program
from fulmen_runner.attempts.workspace import Workspaces
from tests.support.runner.assignments import assignment, tracing_restored
from tests.support.runner.in_process import invocation_of, python_host

AGENTS_AT_ONCE = 100
tracer = trace.get_tracer("mixing")
shared_pool = ThreadPoolExecutor(4)
"""Of all attempts together: its threads are born in one of them."""


@dataclass
class Seen:
    """What arrived of each attempt: keys of calls by the name that the call bears, and everything else by attempt."""

    keys: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    traces: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    url: str = ""


@asynccontextmanager
async def recording(seen: Seen) -> AsyncIterator[None]:
    """Records which key came with each call."""

    async def call(request: web.Request) -> web.Response:
        name = request.headers["x-test-name"]
        key = request.headers.get("x-api-key") or request.headers["authorization"]
        seen.keys[name].append(key.removeprefix("Bearer "))
        seen.traces[name].append(request.headers["traceparent"].split("-")[1])
        return web.json_response({})

    app = web.Application()
    for path in ("/v1/call", "/v1/chat/completions", "/v1/messages"):
        app.router.add_post(path, call)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=512).start()
    seen.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield
    finally:
        await runner.cleanup()


def mark(name: str, part: int) -> None:
    """Does what an agent does, in whatever task or thread: a span, a reward, a call, a look at the environment."""
    with tracer.start_as_current_span(name):
        assert os.environ["NAME"] == name
        emit_reward(part, dimension=f"part.{part}.{name}", trace=False)
    headers = {"authorization": f"Bearer {PLACEHOLDER_KEY}", "x-test-name": name}
    httpx2.post(f"{os.environ['OPENAI_BASE_URL']}/call", headers=headers, trust_env=False).raise_for_status()


async def mark_async(name: str, part: int) -> None:
    await asyncio.sleep(0)
    with tracer.start_as_current_span(name):
        await asyncio.sleep(0)
        await asyncio.to_thread(mark, name, part)


async def gathers(task: dict[str, str]) -> float:
    await asyncio.gather(*(mark_async(task["name"], part) for part in range(3)))
    return 1.0


def blocks(task: dict[str, str]) -> float:
    for part in range(3):
        mark(task["name"], part)
    return 1.0


def pools(task: dict[str, str]) -> float:
    def nested(part: int) -> None:
        with ThreadPoolExecutor(1) as inner:
            inner.submit(mark, task["name"], part).result()

    for waiting in [shared_pool.submit(nested, part) for part in range(3)]:
        waiting.result()
    return 1.0


def steps(task: dict[str, str]):
    for part in range(3):
        mark(task["name"], part)
        yield None
    return 1.0


async def async_steps(task: dict[str, str]):
    for part in range(3):
        await asyncio.create_task(mark_async(task["name"], part))
        yield None
    emit_reward(1.0, trace=False)


def loops(task: dict[str, str]) -> float:
    """A blocking agent with an event loop of its own."""
    return asyncio.run(gathers(task))


async def vendors(task: dict[str, str]) -> float:
    """An agent that calls by the clients of two vendors, each with HTTP clients of its own."""
    name = task["name"]
    headers, message = {"x-test-name": name}, {"role": "user", "content": name}
    async with openai.AsyncOpenAI(default_headers=headers) as client:
        await client.chat.completions.create(model="m", messages=[message])
    async with anthropic.AsyncAnthropic(
        base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), api_key=PLACEHOLDER_KEY, default_headers=headers
    ) as client:
        await client.messages.create(model="m", max_tokens=1, messages=[message])
    for part in range(2):
        emit_reward(part, dimension=f"part.{part}.{name}", trace=False)
    await mark_async(name, 2)
    return 1.0


KINDS: tuple[Callable[..., object], ...] = (gathers, blocks, pools, steps, async_steps, loops, vendors)


class World:
    """Runs programs side by side and knows what belongs to whom."""

    def __init__(self, seen: Seen, spans: InMemorySpanExporter, host: PythonHost, workspaces: Workspaces) -> None:
        self.seen, self.spans, self.host, self.workspaces = seen, spans, host, workspaces

    async def run(self, kinds: list[int]) -> None:
        """Runs an agent of each kind, all at once, and checks that each kept to its own."""
        self.spans.clear()
        assignments = [assignment(input_=b"{}", key=f"key-{number}") for number in range(len(kinds))]
        made = [python_agent(KINDS[kind], self.host, graded=False) for kind in kinds]
        outcomes = await asyncio.gather(
            *(
                self._one(item, Program(agent=agent, grader=None, environment={}))
                for item, agent in zip(assignments, made, strict=True)
            )
        )
        ended = Counter(
            (s.name, s.attributes["fulmen.rollout"], s.context.trace_id) for s in self.spans.get_finished_spans()
        )
        all_names = {_dimension(item.rollout) for item in assignments}
        for item, outcome in zip(assignments, outcomes, strict=True):
            name, trace_id = item.rollout, trace_id_of(item.rollout)
            assert isinstance(outcome, Succeeded)
            assert {reward.dimension for reward in outcome.rewards} == {"reward"} | {
                f"part.{part}.{_dimension(name)}" for part in range(3)
            }
            assert self.seen.keys.pop(_dimension(name)) == [item.attempt_key] * 3
            assert self.seen.traces.pop(_dimension(name)) == [trace_id] * 3
            # Clients that are instrumented add spans of other names, in the same trace.
            mine = {(span, trace_of) for span, rollout, trace_of in ended if rollout == name}
            assert {trace_of for _, trace_of in mine} == {int(trace_id, 16)}
            assert {span for span, _ in mine} & all_names == {_dimension(name)}
        assert not self.seen.keys
        assert {rollout for _, rollout, _ in ended} == {item.rollout for item in assignments}

    async def _one(self, item: Assignment, program: Program) -> object:
        name = _dimension(item.rollout)
        environment = {
            "OPENAI_BASE_URL": f"{self.seen.url}/v1",
            "OPENAI_API_KEY": item.attempt_key,
            "TRACEPARENT": f"00-{trace_id_of(item.rollout)}-{'2' * 16}-01",
            "NAME": name,
        }
        invocation = replace(invocation_of(item, self.workspaces, **environment), task={"name": name})
        with entered(invocation.context):
            return await asyncio.create_task(program.run(invocation))


def _dimension(rollout: str) -> str:
    return trace_id_of(rollout)


async def _with_world(workspaces: Workspaces, check: Callable[[World], object]) -> None:
    seen, spans = Seen(), InMemorySpanExporter()
    async with recording(seen):
        prepare_process(Endpoints(llm_proxy_url=seen.url, otlp_url="http://127.0.0.1:9"))
        add_span_processor(AttemptSpanProcessor(SimpleSpanProcessor(spans)))
        async with python_host(seen.url) as host:
            await check(World(seen, spans, host, workspaces))


@pytest.fixture
def workspaces(tmp_path_factory: pytest.TempPathFactory):
    made = Workspaces(tmp_path_factory.mktemp("mixing"))
    with tracing_restored():
        yield made
    made.close()


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.integers(0, len(KINDS) - 1), min_size=AGENTS_AT_ONCE, max_size=AGENTS_AT_ONCE))
@pytest.mark.long(short=True)
def test_a_hundred_agents_at_once_keep_to_their_own(workspaces: Workspaces, kinds: list[int]) -> None:
    asyncio.run(_with_world(workspaces, lambda world: world.run(kinds)))
