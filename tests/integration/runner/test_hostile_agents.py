"""What becomes of agents that behave badly, by misdeed and by kind of agent: the whole in one table.

The same code runs as a plain function in the runner, in a process of its own, and as a command, all at once, with a good
agent of every kind beside it. Containers have the same table on a real engine (test_containers.py); what only commands
can do is in test_commands_hostile.py, and writing to other rollouts in test_hostile_writes.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulmen.ids import uuid7
from fulmen.runner.v1.agent_spec_pb2 import Isolation
from tests.support.processes import none_holds
from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of
from tests.support.runner.stores import Ended

MEMORY_BYTES = 150_000_000
# Small, so that the proof needs no storm: a few dozen processes at most are ever started.
PROCESS_COUNT = 20
OUTPUT_BYTES = 1_000_000
TIMEOUT_S = 8

AGENT = """
import json, os, signal, subprocess, sys, time

def good(task): return 1
def hangs(task): time.sleep(3600)
def ignores_the_end(task):
    try: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except ValueError: pass
    while True:
        try: time.sleep(3600)
        except BaseException: pass
def leaves_processes(task):
    # Of a session of its own and twice removed; its environment is empty, its arguments hold the marker.
    subprocess.run(["sh", "-c", f"setsid sh -c 'trap : TERM; sleep 3600; : {task['marker']}' >/dev/null 2>&1 &"], env={})
    return 1
def forks(task):
    for _ in range(40): subprocess.Popen(["sh", "-c", f"sleep 3600; : {task['marker']}"], start_new_session=True)
    time.sleep(3600)
def floods(task):
    while True: sys.stdout.write("x" * 65536)
def eats_memory(task):
    held = []
    while len(held) < 15: held.append(os.urandom(20_000_000))
    time.sleep(3600)
def ends_by_a_signal(task): os.kill(os.getpid(), signal.SIGSEGV)
def exits(task): sys.exit(7)
def tells_its_key(task): raise RuntimeError("my key is " + os.environ["OPENAI_API_KEY"])
def says_half_a_character(task): raise RuntimeError("half " + json.loads('"\\\\ud83d"'))
def reports_without_bound(task):
    with open(os.environ.get("FULMEN_PROGRESS_FILE", os.devnull), "w") as file: file.write('{"fraction": 1' + "0" * 400 + "}")
    time.sleep(5)  # the runner looks every two seconds
    return 1
def gives_nan(task): return float("nan")
def gives_infinity(task): return float("inf")
def gives_too_much(task): return 10 ** 400
def gives_nothing(task): return "done"
def gives_ten_thousand(task):
    from fulmen import emit_reward
    for number in range(10_000): emit_reward(number, step=number, trace=False)
    return 1

if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](json.load(sys.stdin))))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an attempt ends: a failure kind and a pattern of its message, or none and so many rewards."""

    kind: str = ""
    says: str = ""
    rewards: int = 1


GOOD = End()
NOT_HELD = None
"""Nothing holds it inside the runner (docs/agents.md): such agents belong in a process. It is not tried."""


def error(says: str) -> End:
    return End(kind="AGENT_ERROR", says=says, rewards=0)


def late(says: str) -> End:
    return End(kind="TIMEOUT", says=says, rewards=0)


LATE = late(rf"timeout of {TIMEOUT_S} s")
LEFT = late("keeps its slot until it returns")
MISSING = End(kind="REWARD_MISSING", rewards=0)
CROWD = error(rf"limit of {PROCESS_COUNT} processes .*\(FULMEN_RUNNER_ATTEMPT_PROCESSES\)")
FLOOD = error(r"output limit of 1000000 bytes.*MAX_COMMAND_OUTPUT")
HUNGRY = error(r"memory limit of 143\.1 MiB \(FULMEN_RUNNER_ATTEMPT_MEMORY_BYTES\)")
SIGNAL = error(r"signal 11 \(SIGSEGV\)")
MASKED = error(r"my key is \[masked\]")
HALF = error(r"half \?")
NO_NUMBER = error("finite")
TOO_MANY = error("at most 256 (rewards|are allowed)")

# misdeed: in the runner, in a process of its own, as a command
MATRIX: dict[str, tuple[End | None, End | None, End | None]] = {
    "good": (GOOD, GOOD, GOOD),
    "hangs": (LEFT, LATE, LATE),
    "ignores_the_end": (LEFT, LATE, LATE),
    "leaves_processes": (NOT_HELD, GOOD, GOOD),
    "forks": (NOT_HELD, CROWD, CROWD),
    "floods": (NOT_HELD, FLOOD, FLOOD),
    "eats_memory": (NOT_HELD, HUNGRY, HUNGRY),
    "ends_by_a_signal": (NOT_HELD, SIGNAL, SIGNAL),
    "exits": (error("SystemExit: 7"), error("SystemExit: 7"), error("status 7")),
    "tells_its_key": (MASKED, MASKED, MASKED),
    "says_half_a_character": (HALF, HALF, error("half ")),
    "reports_without_bound": (GOOD, GOOD, GOOD),
    "gives_nan": (NO_NUMBER, NO_NUMBER, NO_NUMBER),
    "gives_infinity": (NO_NUMBER, NO_NUMBER, NO_NUMBER),
    "gives_too_much": (NO_NUMBER, NO_NUMBER, NO_NUMBER),
    "gives_nothing": (MISSING, MISSING, MISSING),
    "gives_ten_thousand": (TOO_MANY, TOO_MANY, TOO_MANY),
}
KINDS = ("runner", "process", "command")


@pytest.mark.long(short=True)
async def test_every_misdeed_is_contained_and_typed_and_disturbs_no_other(world: World, tmp_path: Path) -> None:
    await world.start(
        attempt_memory_bytes=MEMORY_BYTES,
        attempt_processes=PROCESS_COUNT,
        max_command_output_bytes=OUTPUT_BYTES,
        work_dir=str(tmp_path),
        slots=10,
    )
    marker = f"hostile-{uuid7().hex}"
    files = {"agent.py": AGENT}
    expected: dict[tuple[str, str], End] = {}
    names: dict[tuple[str, str], list[str]] = {}
    for misdeed, ends in MATRIX.items():
        specs = (
            {"python": f"agent.py:{misdeed}"},
            {"python": f"agent.py:{misdeed}", "isolation": Isolation.ISOLATION_PROCESS},
            {"command": ("python", "agent.py", misdeed)},
        )
        for kind, spec, end in zip(KINDS, specs, ends, strict=True):
            if end is NOT_HELD:
                continue
            agent = await world.publish(files, **spec)
            timeout_s = TIMEOUT_S if end.kind == "TIMEOUT" else 60
            expected[misdeed, kind] = end
            batch = rollouts_of(agent, [{"marker": marker}], timeout_s=timeout_s, max_attempts=1)
            names[misdeed, kind] = await world.store.create(batch)
    # Good ones after all of them: they run in what the others left.
    for kind, agent_spec in (("runner", {}), ("process", {"isolation": Isolation.ISOLATION_PROCESS})):
        agent = await world.publish(files, python="agent.py:good", **agent_spec)
        expected["good afterwards", kind] = GOOD
        names["good afterwards", kind] = await world.store.create(rollouts_of(agent, [{}], max_attempts=1))
    ended = await world.store.ended([name for each in names.values() for name in each])
    wrong = {cell: said for cell, end in expected.items() if (said := difference_of(end, ended[names[cell][0]]))}
    assert wrong == {}, wrong
    await none_holds(marker)
    assert list(tmp_path.glob("*/attempt-*")) == []


def difference_of(end: End, attempts: list[Ended]) -> str:
    """Says how an attempt ended, if not as it should have."""
    [ended] = attempts
    fits = ended.kind == end.kind and re.search(end.says, ended.message, re.DOTALL) and "eyJ" not in ended.message
    return "" if fits and len(ended.rewards) == end.rewards else f"{ended.kind}: {ended.message}, {len(ended.rewards)}"
