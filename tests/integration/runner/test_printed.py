"""The end of what agents print, as the store gets it with their attempts."""

from __future__ import annotations

from typing import Any

import pytest

from fulmen.runner.v1.agent_spec_pb2 import Isolation
from fulmen.store.v1.attempt_pb2 import PrintedTail
from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

AGENT = """
import json, os, sys, time

def solve(task):
    print("begins" + "." * 5000)
    print("says", task["word"])
    print("key", os.environ["OPENAI_API_KEY"], "and", task["word"], file=sys.stderr, flush=True)
    if task["word"] == "raises":
        raise RuntimeError("oh")
    if task["word"] == "hangs":
        sys.stdout.flush()
        time.sleep(3600)
    return 1.0
def grade(task, outcome):
    print("graded")
    return 1.0
if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
"""
PROCESS = {"python": "agent.py:solve", "isolation": Isolation.ISOLATION_PROCESS}
KINDS = {"in a process": PROCESS, "a command": {"command": ("python", "agent.py")}}


async def printed(world: World, agent: str, *words: str, timeout_s: float = 60) -> list[PrintedTail]:
    """Runs an agent on each word, one after the other; returns what its attempt printed."""
    tails = []
    for word in words:
        tasks = rollouts_of(agent, [{"word": word}], timeout_s=timeout_s, max_attempts=1)
        [name] = await world.store.create(tasks)
        await world.store.ended([name])
        result = world.double.entries[name].ended[-1].result
        assert result is not None
        tails.append(result.printed)
    return tails


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
async def test_the_end_of_what_an_agent_printed_goes_with_its_attempt(world: World, spec: dict[str, Any]) -> None:
    await world.start(slots=1, printed_bytes=100)
    agent = await world.publish({"agent.py": AGENT}, **spec)
    one, two, raised = await printed(world, agent, "one", "two", "raises")
    for tail, word in ((one, "one"), (two, "two"), (raised, "raises")):
        assert tail.stdout.startswith("....")
        assert f"\nsays {word}\n" in tail.stdout
        assert len(tail.stdout) <= 100
        assert len(tail.stderr) <= 100
    # The next attempt of a process has nothing of the one before.
    assert "one" not in two.stderr
    assert "and two" in two.stderr
    assert "[masked]" in two.stderr
    [hung] = await printed(world, agent, "hangs", timeout_s=4)
    assert "says hangs" in hung.stdout


async def test_nothing_is_kept_of_graders_and_of_agents_in_the_runner(world: World) -> None:
    await world.start(slots=1)
    graded = await world.publish({"agent.py": AGENT}, **PROCESS, python_grader="agent.py:grade")
    [tail] = await printed(world, graded, "one")
    assert "says one" in tail.stdout
    assert "graded" not in tail.stdout
    inside = await world.publish({"agent.py": AGENT}, python="agent.py:solve")
    assert await printed(world, inside, "one") == [PrintedTail()]


async def test_nothing_is_kept_if_that_is_switched_off(world: World) -> None:
    await world.start(slots=1, printed_bytes=0)
    agent = await world.publish({"agent.py": AGENT}, command=("python", "agent.py"))
    assert await printed(world, agent, "one") == [PrintedTail()]
