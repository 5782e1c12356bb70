"""Progress that agents report while they run, and the end of what they print, as the store gets both."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from fulmen.runner.v1.agent_spec_pb2 import Isolation
from fulmen.store.v1.attempt_pb2 import AttemptProgress
from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

AGENT = """
import json, os, sys, time
from pathlib import Path
from fulmen import emit_progress

def solve(task):
    # The environment of an agent has the attempt's key.
    emit_progress(0.5, "with " + os.environ["OPENAI_API_KEY"])
    emit_progress(0.25, "first\\nline, " + "x" * 500)
    until(task["go"])
    emit_progress(text="grading")
    until(task["end"])
    return 1.0
def until(path):
    while not Path(path).exists():
        time.sleep(0.02)
if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
"""
SHELL = """
printf '{"fraction": 0.25, "text": "first line, %0500d"}' 0 > "$FULMEN_PROGRESS_FILE"
while [ ! -e "$1" ]; do sleep 0.05; done
echo '{"text": "grading"}' > "$FULMEN_PROGRESS_FILE"
while [ ! -e "$2" ]; do sleep 0.05; done
echo 1
"""
IN_PROCESS = {"python": "agent.py:solve"}
KINDS = {
    "in the runner": IN_PROCESS,
    "in a process": IN_PROCESS | {"isolation": Isolation.ISOLATION_PROCESS},
    "a command": {"command": (sys.executable, "agent.py")},
    "a command without Fulmen": {"command": ("sh", "agent.sh", "{task.go}", "{task.end}")},
}


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
async def test_the_store_gets_what_an_agent_reports_while_it_runs(
    world: World, tmp_path: Path, spec: dict[str, Any]
) -> None:
    await world.start(slots=1)
    agent = await world.publish({"agent.py": AGENT, "agent.sh": SHELL}, **spec)
    go, end = tmp_path / "go", tmp_path / "end"
    [name] = await world.store.create(rollouts_of(agent, [{"go": str(go), "end": str(end)}]))
    attempt = f"{name}/attempts/1"

    def said() -> list[AttemptProgress]:
        return world.double.progress.get(attempt, [])

    await world.double.until(lambda: bool(said()) and said()[-1].fraction == 0.25)
    assert said()[-1].text.startswith("first line, ")
    assert len(said()[-1].text) <= 200
    go.touch()
    await world.double.until(lambda: said()[-1].text == "grading")
    assert not said()[-1].HasField("fraction")
    end.touch()
    [[ended]] = (await world.store.ended([name])).values()
    assert ended.rewards == {("reward", None): 1.0}
    assert not any("with ey" in one.text for one in said())


async def test_a_progress_file_that_is_none_is_ignored(world: World, tmp_path: Path) -> None:
    await world.start(slots=1)
    go = tmp_path / "go"
    script = (
        f'mkfifo "$FULMEN_PROGRESS_FILE"; while [ ! -e {go} ]; do sleep 0.05; done; rm "$FULMEN_PROGRESS_FILE"; '
        f'ln -s {tmp_path / "told"} "$FULMEN_PROGRESS_FILE"; sleep 3; echo 1'
    )
    (tmp_path / "told").write_text('{"fraction": 0.5}')
    agent = await world.publish({"a": ""}, command=("sh", "-c", script))
    [name] = await world.store.create(rollouts_of(agent, [{}]))
    await world.double.until(lambda: bool(world.double.held_attempts()))
    await asyncio.sleep(2.5)
    go.touch()
    [[ended]] = (await world.store.ended([name])).values()
    assert (ended.message, ended.rewards) == ("", {("reward", None): 1.0})
    assert not world.double.progress
