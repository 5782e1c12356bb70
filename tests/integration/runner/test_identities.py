"""Many agents in one process, each with its own identity."""

from __future__ import annotations

import psutil

from fulmen.ids import trace_id_of
from tests.support.runner.fixtures import PublishAgent, StartRunner
from tests.support.runner.harness import rollouts_of
from tests.support.runner.proxy_double import ProxyDouble
from tests.support.runner.stores import DoubleStore

CONCURRENT = 200
MEMORY_LIMIT_BYTES = 400 * 1024 * 1024

ASK = """
client = AsyncOpenAI(max_retries=0, timeout=100)
MESSAGES = [{"role": "user", "content": "who am I?"}]
async def solve(task, context):
    answer = await client.chat.completions.create(model="m", messages=MESSAGES)
    return float(answer.choices[0].message.content == context.attempt)
"""
EAGER = "from openai import AsyncOpenAI\n" + ASK
LAZY = """
async def solve(task, context):
    from openai import AsyncOpenAI
    async with AsyncOpenAI(max_retries=0, timeout=100) as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    return float(answer.choices[0].message.content == context.attempt)
"""
BLOCKING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI
client = OpenAI(max_retries=0, timeout=100)
pool = ThreadPoolExecutor(2)  # Shared by all attempts: its threads are born in one of them.
def ask():
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    return answer.choices[0].message.content
def solve(task, context):
    said = [ask(), pool.submit(ask).result()]
    thread = threading.Thread(target=lambda: said.append(ask()))
    thread.start()
    thread.join()
    return float(said == [context.attempt] * 3)
"""
ANTHROPIC_STYLE = """
import os
import httpx2
async def solve(task, context):
    async with httpx2.AsyncClient(base_url=os.environ["ANTHROPIC_BASE_URL"]) as client:
        answer = await client.post("/v1/messages", headers={"x-api-key": os.environ["ANTHROPIC_API_KEY"]}, json={})
    return float(answer.json()["content"][0]["text"] == context.attempt)
"""
AT_IMPORT = """
import os
import httpx2
httpx2.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json={"model": "m"})
async def solve(task):
    return 1.0
"""


async def test_200_attempts_at_once_each_carry_their_own_key_within_the_memory_budget(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent, proxy: ProxyDouble
) -> None:
    agent = await publish_agent({"agent.py": EAGER}, python="agent.py:solve")
    runner = await start_runner(slots=CONCURRENT)
    proxy.holding = True
    names = await store.create(rollouts_of(agent, [{}] * CONCURRENT))
    await proxy.until_waiting(CONCURRENT)
    used_bytes = psutil.Process(runner.pid).memory_info().rss
    proxy.release()
    ended = await store.ended(names)
    assert [ended[name][0].rewards for name in names] == [{("reward", None): 1.0}] * CONCURRENT
    assert store.double.most_held == CONCURRENT
    assert used_bytes < MEMORY_LIMIT_BYTES
    for attempt, traceparent in proxy.traceparents.items():
        assert traceparent.split("-")[1] == trace_id_of(attempt)


async def all_right(store: DoubleStore, start_runner: StartRunner, agent: str, count: int) -> None:
    await start_runner(slots=count)
    names = await store.create(rollouts_of(agent, [{}] * count))
    ended = await store.ended(names)
    assert [(ended[name][0].message, ended[name][0].rewards) for name in names] == [
        ("", {("reward", None): 1.0})
    ] * count


async def test_a_client_that_is_imported_and_built_inside_the_attempt_is_attributed(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    await all_right(store, start_runner, await publish_agent({"agent.py": LAZY}, python="agent.py:solve"), 10)


async def test_threads_of_an_agent_carry_its_identity(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    await all_right(store, start_runner, await publish_agent({"agent.py": BLOCKING}, python="agent.py:solve"), 30)


async def test_a_key_in_x_api_key_is_replaced_there(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    await all_right(store, start_runner, await publish_agent({"agent.py": ANTHROPIC_STYLE}, python="agent.py:solve"), 5)


async def test_a_model_call_outside_of_any_attempt_is_refused_and_says_so(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent, proxy: ProxyDouble
) -> None:
    agent = await publish_agent({"agent.py": AT_IMPORT}, python="agent.py:solve")
    await start_runner()
    [name] = await store.create(rollouts_of(agent, [{}]))
    [ended] = (await store.ended([name]))[name]
    assert ended.kind == "AGENT_ERROR"
    assert "outside of an attempt" in ended.message
    assert not proxy.calls
