"""What holds for every framework's agent, however it speaks to the proxy."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from pathlib import Path

from fulmen.store.v1 import lease_service_pb2
from tests.support.frameworks.world import PROGRAM_S, a_world

ANSWER = "6 times 7 is 42. 8 times 9 is 72."
PRODUCT = {"a": 6, "b": 7, "product": 42}
LOOP = ["tool_calls", "stop"]
"""How the model's answers end when an agent has a calculator: two calls of it at once, and what it makes of the results."""


async def ends_well_and_is_captured(home: Path, framework: str, *arguments: str, structured: str) -> None:
    """Runs every scenario of an agent, and checks its results and what was recorded of its calls.

    Args:
        structured: how the model's answer ends when the agent asks for one by a schema: `stop`, or `tool_calls` for
            frameworks that have the model call a tool for it.
    """
    async with a_world(home) as world, asyncio.timeout(PROGRAM_S):
        attempt, key = world.proxy.attempt()
        results = (await world.run(framework, *arguments, key=key)).results
        records = await world.records(attempt)
        assert world.outside.knocks == []
    streams = [results[name] for name in ("agent_stream", "stream") if isinstance(results.get(name), list)]
    assert results["agent"] == ANSWER
    assert results["structured"] == PRODUCT
    assert sorted(results["calls"]) == [[6, 7], [6, 7], [8, 9], [8, 9]]
    assert all(len(parts) > 1 and "".join(parts) == ANSWER for parts in streams)
    plain = ["stop"] if "stream" in results else []
    assert [record.finish_reason for record in records] == [*LOOP, *LOOP, *plain, structured]


async def tries_again(home: Path, framework: str, *arguments: str) -> None:
    """Has a backend refuse twice, before a proxy that sends nothing again: the framework's own client does."""
    async with a_world(home, retry_deadline_s=0) as world, asyncio.timeout(PROGRAM_S):
        attempt, key = world.proxy.attempt()
        world.backend.switches.refusals = deque([429, 503])
        world.backend.switches.retry_after = "1"
        ran = await world.run(framework, *arguments, "agent", key=key)
        assert ran.results["agent"] == ANSWER
        records = await world.records(attempt)
        assert [record.finish_reason for record in records] == LOOP
        assert len(world.backend.received) == 2 + len(LOOP)
        summary = await world.proxy.flush(attempt)
        assert summary.infra_failure_count == 2


async def is_spared_a_failure(home: Path, framework: str, *arguments: str) -> None:
    """Has a backend refuse twice: the proxy sends the call again, and the framework never hears of it."""
    async with a_world(home) as world, asyncio.timeout(PROGRAM_S):
        attempt, key = world.proxy.attempt()
        world.backend.switches.refusals = deque([429, 503])
        world.backend.switches.retry_after = "1"
        ran = await world.run(framework, *arguments, "agent", key=key)
        assert ran.results["agent"] == ANSWER
        summary = await world.proxy.flush(attempt)
        assert (summary.call_count, summary.infra_failure_count) == (len(LOOP), 0)
        assert len(await world.records(attempt)) == len(LOOP)


async def gives_up_when_the_attempt_is_over(home: Path, framework: str, *arguments: str, requests: int = 1) -> None:
    """Ends an attempt before its agent calls: the agent fails, after so many requests, and the backend sees none."""
    async with a_world(home) as world, asyncio.timeout(PROGRAM_S):
        attempt, key = world.proxy.attempt()
        world.store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED)
        while (await world.proxy.chat(key, "What is 6 times 7?"))[0] == 200:
            pass
        refused, seen = world.refusals(), len(world.backend.received)
        ran = await world.run(framework, *arguments, "agent", key=key)
        assert ran.status != 0
        assert "attempt has ended" in ran.errors, ran.errors
        assert (world.refusals() - refused, len(world.backend.received) - seen) == (requests, 0)


async def raises_on_a_broken_stream(home: Path, framework: str, *arguments: str) -> None:
    """Has a backend break off a stream: the agent fails, rather than take the beginning for the whole answer."""
    async with a_world(home) as world, asyncio.timeout(PROGRAM_S):
        attempt, key = world.proxy.attempt()
        world.backend.switches.cut_after_events = 5
        ran = await world.run(framework, *arguments, "stream", key=key)
        assert ran.status != 0
        assert re.search("interrupted its answer|ended before it was complete", ran.errors), ran.errors
        summary = await world.proxy.flush(attempt)
        assert (summary.call_count, summary.unusable_count, len(world.backend.received)) == (1, 1, 1)
