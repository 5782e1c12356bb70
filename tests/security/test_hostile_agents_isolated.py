"""Code of a tenant reaches nothing of the runner that runs it, whatever its agent spec asks for. A real store and runner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen.runner.v1.agent_spec_pb2 import AgentSpec, CommandEntry, Isolation, PythonEntry
from tests.support.isolation import sandboxed
from tests.support.runner.fixtures import World, proxy, publish_agent, start_runner, world
from tests.support.runner.harness import RunnerProcess, bundle_of
from tests.support.runner.stores import Ended, RealStore

pytestmark = pytest.mark.long(short=True)

__all__ = ["proxy", "publish_agent", "start_runner", "store", "world"]

TRUSTED = Isolation.ISOLATION_TRUSTED
MIB = 2**20

AGENT = """
import ctypes, json, os, signal, sys

MOST = 2000  # MiB: a bomb that nothing stops must not fill the disk.

def tried(call):
    try:
        return repr(call())[:80]
    except BaseException as error:
        return type(error).__name__

def look(task, context=None):
    runner, secret = task["runner"], task["secret"]
    kept = [name for name in os.environ if "TOKEN" in name or name.startswith("FULMEN_RUNNER")]
    seen = {
        "variables": kept,
        "environment": tried(lambda: open(f"/proc/{runner}/environ", "rb").read(9)),
        "memory": tried(lambda: open(f"/proc/{runner}/mem", "rb")),
        "file": tried(lambda: open(secret).read()),
        "folder": tried(lambda: os.listdir(os.path.dirname(secret))),
        "write": tried(lambda: open("/usr/lib/fulmen-was-here", "w")),
        "trace": ctypes.CDLL(None).ptrace(16, runner, 0, 0),
        "kill": tried(lambda: os.kill(runner, signal.SIGKILL)),
        "privileges": open("/proc/self/status").read().count("NoNewPrivs:\\t1"),
    }
    return seen

def grade(task, outcome):
    seen = look(task)
    return 1.0 if seen == outcome else {"unlike": 0.0}

def honest(task):
    return 1.0

def bombs(task):
    if task["bomb"] == "forks":
        for _ in range(14):
            os.fork()
        signal.pause()
    if task["bomb"] == "memory":
        kept = []
        for _ in range(MOST // 8):
            kept.append(bytearray(b"x" * (8 << 20)))
    if task["bomb"] == "file":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open(os.environ["TMPDIR"] + "/big", "wb") as file:
            for _ in range(MOST):
                file.write(b"x" * (1 << 20))
    for number in range(MOST):
        with open(os.path.join(os.environ["TMPDIR"], str(number)), "wb") as file:
            file.write(b"x" * (1 << 20))

if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps(bombs(task) if "bomb" in task else look(task)))
    print(1.0)
"""
FILES = {"agent.py": AGENT}
LIMITS = {
    "isolation": "sandbox",
    "attempt_memory_bytes": 512 * MIB,
    "attempt_processes": 100,
    "attempt_disk_bytes": 64 * MIB,
}


@pytest_asyncio.fixture
async def store(database_url: str) -> AsyncIterator[RealStore]:
    async with RealStore(database_url) as running:
        yield running


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Returns a file as private as the runner's token."""
    path = tmp_path / "runner.token"
    path.write_text("a token")
    path.chmod(0o600)
    return path


def assert_blind(seen: dict[str, object]) -> None:
    """Asserts that an agent has seen and reached nothing."""
    denied = {"FileNotFoundError", "PermissionError", "ProcessLookupError", "OSError"}
    assert (seen["variables"], seen["trace"], seen["privileges"]) == ([], -1, 1), seen
    assert {str(seen[each]) for each in ("environment", "memory", "file", "folder", "write", "kill")} <= denied, seen


async def looked(world: World, runner: RunnerProcess, secret: Path, **spec: object) -> Ended:
    agent = await world.publish(FILES, **spec)
    return await world.run(agent, {"runner": runner.pid, "secret": str(secret)}, max_attempts=1)


@sandboxed
async def test_a_python_agent_that_asks_for_less_than_the_operator_requires_gets_what_is_required(
    world: World, secret: Path
) -> None:
    runner = await world.start(isolation="sandbox")
    ended = await looked(
        world, runner, secret, python="agent.py:look", python_grader="agent.py:grade", isolation=TRUSTED
    )
    assert_blind(json.loads(ended.output))
    assert ended.rewards == {("reward", None): 1.0}, "its grader sees as little"


@sandboxed
@pytest.mark.parametrize("floor", ["sandbox", "trusted"])
async def test_a_command_reaches_nothing_of_the_runner(world: World, secret: Path, floor: str) -> None:
    runner = await world.start(isolation=floor)
    bundle = await world.store.publish("bundle.tests", bundle_of(FILES))
    # An agent may ask for more than the operator requires.
    entry = CommandEntry(
        argv=["python", "agent.py"], isolation=Isolation.ISOLATION_SANDBOX if floor == "trusted" else 1
    )
    agent = await world.store.publish("agent.tests", AgentSpec(bundle=bundle, command=entry).SerializeToString())
    ended = await world.run(agent, {"runner": runner.pid, "secret": str(secret)}, max_attempts=1)
    assert_blind(json.loads(ended.output.splitlines()[0]))
    assert ended.rewards == {("reward", None): 1.0}


async def test_not_even_a_trusted_agent_finds_the_runners_token_in_its_environment(world: World, secret: Path) -> None:
    runner = await world.start(isolation="trusted")
    agent = await world.publish(
        {
            "agent.py": "import os\ndef look(task): return [k for k in os.environ if k.startswith('FULMEN_RUNNER_T')]\n"
            "def grade(task, outcome): return 1"
        },
        python="agent.py:look",
        python_grader="agent.py:grade",
    )
    ended = await world.run(agent, {}, max_attempts=1)
    assert json.loads(ended.output) == []
    assert b"eyJ" not in await asyncio.to_thread(Path(f"/proc/{runner.pid}/environ").read_bytes)


@sandboxed
@pytest.mark.parametrize("kind", ["python", "command"])
@pytest.mark.parametrize(
    ("bomb", "says"),
    [
        ("forks", ("exceeded the limit of 100 processes", "Resource temporarily unavailable")),
        ("memory", ("memory limit of 512.0 MiB",)),
        # The kernel refuses to write, or the runner sees first that file and folders together are too large.
        ("file", ("File too large", "exceeded the limit of 64.0 MiB of files")),
        ("files", ("exceeded the limit of 64.0 MiB of files",)),
    ],
)
async def test_a_bomb_ends_its_own_attempt_by_default_and_with_the_reason(
    world: World, kind: str, bomb: str, says: tuple[str, ...]
) -> None:
    await world.start(slots=2, **LIMITS)
    how = {"python": "agent.py:bombs"} if kind == "python" else {"command": ("python", "agent.py")}
    agent = await world.publish(FILES, **how)
    ended = await world.run(agent, {"bomb": bomb}, max_attempts=1)
    assert (ended.kind, any(each in ended.message for each in says)) == ("AGENT_ERROR", True), ended.message
    honest = await world.publish(FILES, python="agent.py:honest")
    assert (await world.run(honest, {}, max_attempts=1)).rewards == {("reward", None): 1.0}


@sandboxed
async def test_attempts_of_different_agents_do_not_see_each_other(world: World) -> None:
    await world.start(slots=4, isolation="sandbox")
    agent = await world.publish(
        {
            "agent.py": "import os, time\n"
            "def solve(task, context):\n"
            "    (context.work_dir / 'mine').write_text('private')\n"
            "    parent = context.work_dir.parent.parent.parent\n"
            "    seen = sorted(os.listdir(parent)) if os.access(parent, os.R_OK) else []\n"
            "    return {'seen': [n for n in seen if n.startswith(('attempt', 'program'))], 'reward': 1}\n"
            "def grade(task, outcome): return len(outcome['seen']) <= 1\n"
        },
        python="agent.py:solve",
        python_grader="agent.py:grade",
    )
    for attempts in await world.attempts(agent, [{}] * 3, max_attempts=1):
        assert attempts[0].rewards == {("reward", None): 1.0}, attempts[0]


@pytest.mark.parametrize("kind", ["python", "command", "grader"])
async def test_an_agent_that_is_no_container_is_refused_where_the_operator_requires_one(
    world: World, kind: str
) -> None:
    await world.start(isolation="container")
    how = {"python": "agent.py:honest"} if kind != "command" else {"command": ("python", "agent.py")}
    agent = await world.publish(FILES, isolation=TRUSTED, **how)
    ended = await world.run(agent, {}, max_attempts=3)
    assert ended.kind == "AGENT_ERROR"
    assert "requires `container` (FULMEN_RUNNER_ISOLATION): make it a container or a job" in ended.message


@pytest.mark.parametrize("isolation", ["trusted", pytest.param("sandbox", marks=sandboxed)])
@pytest.mark.parametrize(
    "bundle",
    [
        {"/".join(["d"] * 3000) + "/agent.py": ""},
        {"../agent.py": ""},
        {"a": "", "a/b": ""},
        {f"{number}/{'x' * 300}": "" for number in range(3)},
    ],
    ids=["3,000 folders", "outside", "a file as a folder", "long names"],
)
async def test_a_malformed_bundle_is_an_error_of_the_agent_and_not_retried(
    world: World, bundle: dict[str, str], isolation: str
) -> None:
    await world.start(isolation=isolation)
    name = await world.store.publish("bundle.tests", bundle_of(bundle))
    spec = AgentSpec(bundle=name, python=PythonEntry(target="agent.py:solve"))
    agent = await world.store.publish("agent.tests", spec.SerializeToString())
    [attempts] = await world.attempts(agent, [{}], max_attempts=3)
    assert [(each.kind, each.message.startswith("agent bundle cannot be unpacked: ")) for each in attempts] == [
        ("AGENT_ERROR", True)
    ]
    assert "/tmp" not in attempts[0].message  # No path of the runner.
