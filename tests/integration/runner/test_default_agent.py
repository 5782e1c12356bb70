"""Rollouts that name no agent run the one that the runner was started with."""

from __future__ import annotations

from pathlib import Path

from tests.support.runner.fixtures import StartRunner
from tests.support.runner.harness import rollouts_of
from tests.support.runner.stores import DoubleStore


async def test_the_runners_own_agent_and_grader(store: DoubleStore, start_runner: StartRunner, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def solve(task):\n    return task['word']\ndef grade(task, outcome):\n    return len(outcome)\n"
    )
    await start_runner(agent=f"{tmp_path}/mine.py:solve", grader=f"{tmp_path}/mine.py:grade")
    [name] = await store.create(rollouts_of("", [{"word": "four"}]))
    [ended] = (await store.ended([name]))[name]
    assert (ended.message, ended.rewards) == ("", {("reward", None): 4.0})


async def test_a_runner_without_one_says_so(store: DoubleStore, start_runner: StartRunner) -> None:
    await start_runner()
    [name] = await store.create(rollouts_of("", [{}]))
    [ended] = (await store.ended([name]))[name]
    assert ended.kind == "AGENT_ERROR"
    assert "has no default agent" in ended.message
