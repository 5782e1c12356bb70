"""Reports and sessions under a store that misbehaves."""

from __future__ import annotations

import psutil
import pytest

from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

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


async def test_a_result_whose_acknowledgement_was_lost_is_recorded_once(world: World) -> None:
    agent = await world.publish(QUICK, python="agent.py:solve")
    runner = await world.start()
    world.double.swallow_acks = True
    names = await world.store.create(rollouts_of(agent, [{}] * 50))
    await world.store.ended(names)
    await world.store.kill()
    world.double.swallow_acks = False
    await world.store.revive()
    await runner.logged("session_opened", count=2)
    more = await world.store.create(rollouts_of(agent, [{}]))
    ended = await world.store.ended(names + more)
    assert [len(ended[name]) for name in names] == [1] * 50


async def test_a_result_that_the_store_refuses_becomes_an_agent_error(world: World) -> None:
    agent = await world.publish(QUICK, python="agent.py:solve")
    await world.start()
    world.double.refuse_results = 1
    ended = await world.run(agent, {})
    assert ended.kind == "AGENT_ERROR"
    assert "refused by the test" in ended.message


async def test_agents_stop_when_their_leases_are_lost_and_the_runner_continues(world: World) -> None:
    agent = await world.publish(ASKING, python="agent.py:solve")
    runner = await world.start(slots=4)
    world.proxy.holding = True
    names = await world.store.create(rollouts_of(agent, [{}] * 4, max_attempts=2))
    await world.proxy.until_waiting(4)
    world.double.end_sessions()
    await runner.logged("attempt_stopped", count=4)
    await world.store.kill()
    await world.store.revive()
    world.proxy.release()
    ended = await world.store.ended(names)
    assert [[e.kind for e in ended[name]] for name in names] == [["LEASE_LOST", ""]] * 4
    assert (await runner.logged("session_opened", count=2))["resumed"] is False


async def test_a_session_that_ended_while_the_stream_was_down_is_replaced(world: World) -> None:
    agent = await world.publish(ASKING, python="agent.py:solve")
    runner = await world.start(slots=4)
    world.proxy.holding = True
    names = await world.store.create(rollouts_of(agent, [{}] * 4, max_attempts=2))
    await world.proxy.until_waiting(4)
    await world.store.kill()
    world.double.forget_sessions()
    await world.store.revive()
    await runner.logged("session_ended")
    world.proxy.release()
    ended = await world.store.ended(names)
    assert [[e.kind for e in ended[name]] for name in names] == [["LEASE_LOST", ""]] * 4


async def test_never_more_runs_than_there_are_slots(world: World) -> None:
    agent = await world.publish(QUICK, python="agent.py:solve")
    await world.start(slots=7)
    names = await world.store.create(rollouts_of(agent, [{}] * 500))
    await world.store.ended(names)
    assert world.double.most_held <= 7 * 2  # Those that run, and those whose report is on its way.


async def test_a_thread_that_cannot_be_stopped_keeps_its_slot(world: World) -> None:
    agent = await world.publish(HANGING, python="agent.py:solve")
    runner = await world.start(slots=2)
    [stuck] = await world.store.create(rollouts_of(agent, [{"sleep_s": 3600}], timeout_s=2))
    assert [e.kind for e in (await world.store.ended([stuck]))[stuck]] == ["TIMEOUT"]
    world.double.most_held = 0
    names = await world.store.create(rollouts_of(agent, [{"sleep_s": 0.01}] * 10))
    await world.store.ended(names)
    assert world.double.most_held <= 2
    assert psutil.Process(runner.pid).is_running()


async def test_a_wrong_token_is_one_clear_error(world: World) -> None:
    with pytest.raises(AssertionError, match="The token is malformed"):
        await world.start(token="nonsense")
