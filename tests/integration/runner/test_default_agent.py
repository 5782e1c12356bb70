"""Rollouts that name no agent run the one that the runner was started with."""

from __future__ import annotations

from pathlib import Path

from tests.support.runner.fixtures import World


async def test_the_runners_own_agent_and_grader(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def solve(task):\n    return task['word']\ndef grade(task, outcome):\n    return len(outcome)\n"
    )
    await world.start(agent=f"{tmp_path}/mine.py:solve", grader=f"{tmp_path}/mine.py:grade")
    ended = await world.run("", {"word": "four"})
    assert (ended.message, ended.rewards) == ("", {("reward", None): 4.0})


async def test_a_runner_without_one_says_so(world: World) -> None:
    await world.start()
    ended = await world.run("", {})
    assert ended.kind == "AGENT_ERROR"
    assert "has no default agent" in ended.message
