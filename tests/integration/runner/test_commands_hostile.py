"""Misdeeds that only commands can do: each is contained and typed, leaves nothing behind, and disturbs no other attempt.

Those of every kind of agent are in test_hostile_agents.py.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulmen.ids import uuid7
from tests.support.processes import none_holds
from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of, wait_for_exit
from tests.support.runner.stores import Ended

MEMORY_BYTES = 150_000_000
PROCESS_COUNT = 24
OUTPUT_BYTES = 1_000_000
TIMEOUT_S = 60
"""Longer than any case should take; an attempt that hangs ends with it."""

FILES = {
    "eat.py": """
import os, time
os.fork(), os.fork()
held = os.urandom(60_000_000)
time.sleep(3600)
""",
    "threads.py": """
import threading, time
for _ in range(40):
    threading.Thread(target=time.sleep, args=(3600,)).start()
""",
    "escape.py": """
import os, sys, time
# Twice forked, in a session of its own, without the environment: nothing ties it to the attempt but its descent.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[2], "w") as file:
            file.write(str(os.getpid()))
        os.execve("/bin/sh", ["sh", "-c", "trap '' TERM; sleep 3600; : " + sys.argv[1]], {})
    os._exit(0)
while not (os.path.exists(sys.argv[2]) and open(sys.argv[2]).read()):
    time.sleep(0.01)
""",
    "zombies.py": """
import os
for _ in range(12):
    if os.fork() == 0:
        os._exit(0)
print(1)
""",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script, and what becomes of it: `kind` and text in the message, or a reward."""

    script: str
    kind: str = "AGENT_ERROR"
    says: str = ""
    rewards: tuple[tuple[str, float], ...] = ()


def good(script: str, *rewards: tuple[str, float]) -> Case:
    return Case(script=script, kind="", rewards=rewards or (("reward", 1.0),))


CASES = {
    "kills itself": Case(script="echo last words >&2; kill -KILL $$", says=r"signal 9 \(SIGKILL\)\nlast words"),
    "exits": Case(script="echo why >&2; exit 7", says=r"exited with status 7\nwhy"),
    "floods its errors": Case(script="exec cat /dev/zero >&2", says="output limit of 1000000 bytes"),
    "starts threads": Case(script="exec python threads.py", says=r"limit of \d+ processes and threads"),
    "eats memory in four processes": Case(
        script="exec python eat.py", says=r"memory limit of 143\.1 MiB \(FULMEN_RUNNER_ATTEMPT_MEMORY"
    ),
    "kills its keeper": Case(script="kill -KILL $PPID; sleep 3600", says="keeper process died"),
    "escapes and ends": good('python escape.py "$1" "$PIDS/$1"; echo 1'),
    "escapes and fails": Case(script='python escape.py "$1" "$PIDS/$1"; exit 5', says="status 5"),
    "leaves zombies": good("exec python zombies.py"),
    "leaves a background process": good("sleep 3600 & echo 1"),
    "closes its input": good("exec <&-; echo 1"),
    "closes its output": Case(script="exec >&- 2>&-; exit 6", says="status 6"),
    "prints no text": good(r"printf '\377\376\n0.5\n'", ("reward", 0.5)),
    "prints its key": Case(
        script='echo "$OPENAI_API_KEY $OTEL_EXPORTER_OTLP_HEADERS" >&2; echo "$OPENAI_API_KEY" >"$PIDS/key"; exit 1',
        says=r"\[masked\] authorization=Bearer%20\[masked\]",
    ),
    "gives rewards in its file": good(
        """for value in 0.5 0.25; do echo '{"value": '$value', "dimension": "style"}' >>"$FULMEN_REWARDS_FILE"; done
        echo '{"value": 0}' >>"$FULMEN_REWARDS_FILE"; echo 1""",
        ("reward", 1.0),
        ("style", 0.25),
    ),
    "gives broken rewards": Case(script='echo x >>"$FULMEN_REWARDS_FILE"; echo 1', says="line 1: "),
    "makes its rewards a pipe": Case(
        script='rm "$FULMEN_REWARDS_FILE"; mkfifo "$FULMEN_REWARDS_FILE"; echo 1', says="not a regular file"
    ),
    "makes its rewards a link": Case(
        script='ln -sf /etc/passwd "$FULMEN_REWARDS_FILE"; echo 1', says="rewards file cannot be read"
    ),
    "locks its files": good(
        """[ -z "$(ls -A "$FULMEN_WORK_DIR")" ] && mkdir -p "$FULMEN_WORK_DIR/a/b" && touch "$FULMEN_WORK_DIR/a/b/c"
        chmod 000 "$FULMEN_WORK_DIR/a/b" "$FULMEN_WORK_DIR" && [ -d "$TMPDIR" ] && mktemp >&2 && echo 1"""
    ),
    "cannot be started": Case(script="\0", says="NUL"),
}


async def test_every_one_is_contained_and_typed(world: World, tmp_path: Path) -> None:
    work_dir, pids = tmp_path / "work", tmp_path / "pids"
    work_dir.mkdir()
    pids.mkdir()
    await world.start(
        attempt_memory_bytes=MEMORY_BYTES,
        attempt_processes=PROCESS_COUNT,
        max_command_output_bytes=OUTPUT_BYTES,
        work_dir=str(work_dir),
        slots=16,
    )
    agent = await world.publish(
        FILES,
        command=("bash", "-c", "{task.script}", "agent", "{task.token}"),
        environment={"PIDS": str(pids), "TOKEN": "{task.token}"},
    )
    run = uuid7().hex
    cases = {
        name: case for bad, each in CASES.items() for name, case in ((bad, each), (f"beside {bad}", good("echo 1")))
    }
    tokens = {name: f"token-{run}-{number}" for number, name in enumerate(cases)}
    tasks = [{"script": case.script, "token": tokens[name]} for name, case in cases.items()]
    names = await world.store.create(rollouts_of(agent, tasks, timeout_s=TIMEOUT_S, max_attempts=1))
    ended = await world.store.ended(names)
    wrong = {
        name: difference
        for (name, case), rollout in zip(cases.items(), names, strict=True)
        if (difference := difference_of(case, ended[rollout]))
    }
    assert wrong == {}
    key = (pids / "key").read_text().strip()
    assert key
    assert not [each for attempts in ended.values() for each in attempts if key in each.message]
    for path in pids.glob("token-*"):
        await wait_for_exit(int(path.read_text()))
    await none_holds(f"token-{run}")
    assert list(work_dir.glob("*/attempt-*")) == []


def difference_of(case: Case, attempts: list[Ended]) -> str:
    [ended] = attempts
    if ended.kind != case.kind or not re.search(case.says, ended.message, re.DOTALL):
        return f"{ended.kind}: {ended.message}"
    rewards = {dimension: value for (dimension, _), value in ended.rewards.items()}
    return "" if rewards == dict(case.rewards) else f"rewards {rewards}"


async def test_nothing_outlives_a_runner_that_is_killed_not_even_what_escaped(world: World, tmp_path: Path) -> None:
    runner = await world.start()
    escaped = tmp_path / "escaped"
    script = 'python escape.py token "$1"; trap "" TERM; echo $$ >"$1.leader"; while :; do sleep 1; done'
    agent = await world.publish(FILES, command=("bash", "-c", script, "agent", str(escaped)))
    await world.store.create(rollouts_of(agent, [{}]))
    await world.double.until(lambda: Path(f"{escaped}.leader").exists(), 30)
    runner.send(signal.SIGKILL)
    await wait_for_exit(int(escaped.read_text()))
    await wait_for_exit(int(Path(f"{escaped}.leader").read_text() or 0))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("echo", "{task.missing}", "{nonsense}"), r"argument 1: \{task.missing\}.*argument 2: \{nonsense\}"),
        (("{task.program}",), "No such file"),
    ],
)
async def test_templates_that_do_not_fit_start_nothing(world: World, argv: tuple[str, ...], says: str) -> None:
    await world.start()
    agent = await world.publish({"x": ""}, command=argv)
    ended = await world.run(agent, {"program": "no such program"}, max_attempts=1)
    assert ended.kind == "AGENT_ERROR"
    assert re.search(says, ended.message)


async def test_a_grader_finds_what_the_agent_left_and_gives_rewards_in_a_file_of_its_own(world: World) -> None:
    agent_script = """echo left >"$FULMEN_WORK_DIR/file"; echo '{{"value": 0.1}}' >>"$FULMEN_REWARDS_FILE"
    echo '{{"value": 0.2, "dimension": "own", "step": 3}}' >>"$FULMEN_REWARDS_FILE"; echo done"""
    grader_script = """[ "$(cat {work_dir}/file)" = left ] && [ ! -s "$FULMEN_REWARDS_FILE" ] &&
    echo '{{"value": 0.9}}' >>"$FULMEN_REWARDS_FILE"; echo '{{"graded": 0.8}}'"""
    await world.start()
    agent = await world.publish(
        {"x": ""}, command=("bash", "-c", agent_script), command_grader=("bash", "-c", grader_script)
    )
    ended = await world.run(agent, {}, max_attempts=1)
    assert (ended.message, ended.rewards) == ("", {("reward", None): 0.9, ("own", 3): 0.2, ("graded", None): 0.8})
