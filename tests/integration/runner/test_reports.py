"""Reports and sessions under a store that misbehaves."""

from __future__ import annotations

import psutil
import pytest

from tests.support.runner.fixtures import PublishAgent, StartRunner
from tests.support.runner.harness import rollouts_of
from tests.support.runner.proxy_double import ProxyDouble
from tests.support.runner.stores import DoubleStore

QUICK = {"agent.py": "async def solve(task):\n    return 1.0\n"}
ASKING = {
    "agent.py": """
import os
import httpx2
async def solve(task, context):
    async with httpx2.AsyncClient(timeout=100) as client:
        await client.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json={"model": "m"})
    return 1.0
"""
}
HANGING = {
    "agent.py": """
import time
def solve(task):
    time.sleep(task["sleep_s"])
    return 1.0
"""
}


async def test_a_result_whose_acknowledgement_was_lost_is_recorded_once(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    agent = await publish_agent(QUICK, python="agent.py:solve")
    runner = await start_runner()
    store.double.swallow_acks = True
    names = await store.create(rollouts_of(agent, [{}] * 50))
    await store.ended(names)
    await store.kill()
    store.double.swallow_acks = False
    await store.revive()
    await runner.logged("session_opened", count=2)
    more = await store.create(rollouts_of(agent, [{}]))
    ended = await store.ended(names + more)
    assert [len(ended[name]) for name in names] == [1] * 50


async def test_a_result_that_the_store_refuses_becomes_an_agent_error(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    agent = await publish_agent(QUICK, python="agent.py:solve")
    await start_runner()
    store.double.refuse_results = 1
    [name] = await store.create(rollouts_of(agent, [{}]))
    [ended] = (await store.ended([name]))[name]
    assert ended.kind == "AGENT_ERROR"
    assert "refused by the test" in ended.message


async def test_agents_stop_when_their_leases_are_lost_and_the_runner_goes_on(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent, proxy: ProxyDouble
) -> None:
    agent = await publish_agent(ASKING, python="agent.py:solve")
    runner = await start_runner(slots=4)
    proxy.holding = True
    names = await store.create(rollouts_of(agent, [{}] * 4, max_attempts=2))
    await proxy.until_waiting(4)
    store.double.end_sessions()
    await runner.logged("attempt_stopped", count=4)
    await store.kill()
    await store.revive()
    proxy.release()
    ended = await store.ended(names)
    assert [[e.kind for e in ended[name]] for name in names] == [["LEASE_LOST", ""]] * 4
    assert (await runner.logged("session_opened", count=2))["resumed"] is False


async def test_a_session_that_ended_while_the_stream_was_down_starts_anew(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent, proxy: ProxyDouble
) -> None:
    agent = await publish_agent(ASKING, python="agent.py:solve")
    runner = await start_runner(slots=4)
    proxy.holding = True
    names = await store.create(rollouts_of(agent, [{}] * 4, max_attempts=2))
    await proxy.until_waiting(4)
    await store.kill()
    store.double.forget_sessions()
    await store.revive()
    await runner.logged("session_ended")
    proxy.release()
    ended = await store.ended(names)
    assert [[e.kind for e in ended[name]] for name in names] == [["LEASE_LOST", ""]] * 4


async def test_never_more_runs_than_there_are_slots(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    agent = await publish_agent(QUICK, python="agent.py:solve")
    await start_runner(slots=7)
    names = await store.create(rollouts_of(agent, [{}] * 500))
    await store.ended(names)
    assert store.double.most_held <= 7 * 2  # Those that run, and those whose report is on its way.


async def test_a_thread_that_cannot_be_stopped_keeps_its_slot(
    store: DoubleStore, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    agent = await publish_agent(HANGING, python="agent.py:solve")
    runner = await start_runner(slots=2)
    [stuck] = await store.create(rollouts_of(agent, [{"sleep_s": 3600}], timeout_s=2))
    assert [e.kind for e in (await store.ended([stuck]))[stuck]] == ["TIMEOUT"]
    store.double.most_held = 0
    names = await store.create(rollouts_of(agent, [{"sleep_s": 0.01}] * 10))
    await store.ended(names)
    assert store.double.most_held <= 2
    assert psutil.Process(runner.pid).is_running()


async def test_a_wrong_token_is_one_clear_error(store: DoubleStore, start_runner: StartRunner) -> None:
    with pytest.raises(AssertionError, match="The token is malformed"):
        await start_runner(token="nonsense")
