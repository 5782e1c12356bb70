"""Many agents in one process, each with its own identity."""

from __future__ import annotations

import psutil

from fulmen.ids import trace_id_of
from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

CONCURRENT = 200
MEMORY_LIMIT_BYTES = 400 * 1024 * 1024

ASK = """
from openai import AsyncOpenAI
client = AsyncOpenAI(max_retries=0, timeout=100)
MESSAGES = [{"role": "user", "content": "who am I?"}]
async def solve(task, context):
    answer = await client.chat.completions.create(model="m", messages=MESSAGES)
    return float(answer.choices[0].message.content == context.attempt)
"""
AT_IMPORT = """
import os
import httpx2
httpx2.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json={"model": "m"})
async def solve(task):
    return 1.0
"""


async def test_200_attempts_at_once_each_carry_their_own_key_within_the_memory_budget(world: World) -> None:
    agent = await world.publish({"agent.py": ASK}, python="agent.py:solve")
    runner = await world.start(slots=CONCURRENT)
    world.proxy.holding = True
    names = await world.store.create(rollouts_of(agent, [{}] * CONCURRENT))
    await world.proxy.until_waiting(CONCURRENT)
    used_bytes = psutil.Process(runner.pid).memory_info().rss
    world.proxy.release()
    ended = await world.store.ended(names)
    assert [ended[name][0].rewards for name in names] == [{("reward", None): 1.0}] * CONCURRENT
    assert world.double.most_held == CONCURRENT
    assert used_bytes < MEMORY_LIMIT_BYTES
    for attempt, traceparent in world.proxy.traceparents.items():
        assert traceparent.split("-")[1] == trace_id_of(attempt)


async def test_a_model_call_outside_of_any_attempt_is_refused_and_says_so(world: World) -> None:
    agent = await world.publish({"agent.py": AT_IMPORT}, python="agent.py:solve")
    await world.start()
    ended = await world.run(agent, {})
    assert ended.kind == "AGENT_ERROR"
    assert "outside of an attempt" in ended.message
    assert not world.proxy.calls
