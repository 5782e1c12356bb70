"""A runner that is stopped in the middle of much work: it ends in time, and no attempt is lost, doubled or charged."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

LONG, SHORT, COUNT = 4, 40, 120
# The first few attempts in a process do not end before the gate is there, nor do those after so many short ones.
AGENT = """
import asyncio, itertools, pathlib
gate, numbers = pathlib.Path({gate!r}), itertools.count()
async def solve(task, context):
    number = next(numbers)
    await asyncio.sleep(0.05)
    while not {long} <= number < {short} and not gate.exists():
        await asyncio.sleep(0.05)
    return 1.0
"""


async def test_a_runner_that_is_stopped_under_load_exits_0_and_every_rollout_ends_exactly_once(
    world: World, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    agent = await world.publish(
        {"agent.py": AGENT.format(gate=str(gate), long=LONG, short=SHORT)}, python="agent.py:solve"
    )
    names = await world.store.create(rollouts_of(agent, [{}] * COUNT, max_attempts=1))
    runner = await world.start(slots=8, drain_grace_s=2)
    await runner.logged("attempt_finished", count=20)
    runner.send(signal.SIGTERM)
    assert await runner.exit_code() == 0
    finished = sum(line["event"] == "attempt_finished" and not line["released"] for line in runner.log)
    assert finished < COUNT - LONG, "it was stopped too late to have anything left"
    gate.touch()
    await world.start(slots=8)
    ended = await world.store.ended(names)
    kinds = [[attempt.kind for attempt in ended[name]] for name in names]
    # What ran or had just been assigned is given back; each has one attempt that counts, the one that it may have.
    assert all(one in ([""], ["RELEASED", ""]) for one in kinds)
    assert kinds.count(["RELEASED", ""]) >= LONG
    assert kinds.count([""]) >= finished
