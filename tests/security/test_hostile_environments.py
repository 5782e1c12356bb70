"""No variable that a tenant chooses decides what runs outside the sandbox, or before its privileges are dropped."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen.runner.v1.agent_spec_pb2 import AgentSpec, CommandEntry, PythonEntry
from fulmen_service_kit.isolation.launch import Isolator
from fulmen_service_kit.isolation.levels import Isolation
from tests.support.runner.fixtures import World, proxy, publish_agent, start_runner, world
from tests.support.runner.harness import bundle_of
from tests.support.runner.stores import RealStore

__all__ = ["proxy", "publish_agent", "start_runner", "store", "world"]

NO_SANDBOX = Isolator(Isolation.SANDBOX, setting="FULMEN_RUNNER_ISOLATION").problem
pytestmark = pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX[:200])

FAKE = "#!/bin/sh\nid -u >> {place}/ran\ncat /etc/shadow >> {place}/ran\nexit 3\n"
LAUNCHERS = ("setpriv", "env", "prlimit", "bwrap", "python")
LOOK = """
import json, os, sys
seen = {
    "uid": os.getuid(),
    "shadow": os.access("/etc/shadow", os.R_OK),
    "kept": os.environ.get("KEPT"),
    "odd": os.environ.get("an.odd-name"),
    "files": [each for each in map(int, os.listdir("/proc/self/fd")) if each > 30 and os.path.exists(f"/proc/self/fd/{each}")],
}
def solve(task):
    return seen
if __name__ == "__main__":
    print(json.dumps(seen))
"""


@pytest_asyncio.fixture
async def store(database_url: str) -> AsyncIterator[RealStore]:
    async with RealStore(database_url) as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Returns a folder that everybody may write, but a sandboxed agent is not given."""
    folder = tmp_path / "outside"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def hostile(place: Path) -> dict[str, str]:
    """Returns variables by which the loader, a shell or Python would run or write something of the tenant's."""
    return {
        "LD_DEBUG": "files",
        "LD_DEBUG_OUTPUT": str(place / "loader"),
        "LD_PRELOAD": "./evil.so",
        "LD_LIBRARY_PATH": ".",
        "LD_AUDIT": "./evil.so",
        "GCONV_PATH": ".",
        "LOCPATH": ".",
        "BASH_ENV": "./setpriv",
        "ENV": "./setpriv",
        "PYTHONPATH": ".",
        "PYTHONSTARTUP": "./evil.py",
        "PYTHONINSPECT": "",
        "PATH": ".:/usr/local/bin:/usr/bin:/bin",
        "KEPT": "as it is\nof two lines",
        "an.odd-name": "",
    }


@pytest.mark.parametrize("kind", ["python", "command"])
async def test_variables_of_an_agent_take_effect_in_its_sandbox_only(world: World, place: Path, kind: str) -> None:
    await world.start(isolation="sandbox")
    files = {name: FAKE.format(place=place) for name in LAUNCHERS} | {
        "agent.py": LOOK,
        "sitecustomize.py": f"open({str(place / 'ran')!r}, 'a').write('site')",
        "evil.so": "no library",
    }
    spec = AgentSpec(
        bundle=await world.store.publish("bundle.tests", bundle_of(files, mode=0o755)), environment=hostile(place)
    )
    if kind == "python":
        spec.python.CopyFrom(PythonEntry(target="agent.py:solve"))
    else:
        spec.command.CopyFrom(CommandEntry(argv=["python3", "-S", "agent.py"]))
    agent = await world.store.publish("agent.tests", spec.SerializeToString())
    ended = await world.run(agent, {}, max_attempts=1)
    assert [path.read_text() for path in place.iterdir()] == []
    assert ended.kind != "AGENT_ERROR", ended.message
    output = ended.output.decode()
    seen = json.loads(output if kind == "python" else next(e for e in output.splitlines() if e.startswith("{")))
    assert (seen["kept"], seen["odd"], seen["shadow"], seen["files"]) == ("as it is\nof two lines", "", False, [])
    assert seen["uid"] != 0 or os.geteuid() != 0


async def test_no_program_of_a_bundle_replaces_one_of_the_launch(world: World) -> None:
    await world.start(isolation="sandbox")
    files = dict.fromkeys(LAUNCHERS, "#!/bin/sh\nid -u; head -c 20 /etc/shadow; exit 3\n")
    entry = CommandEntry(argv=["/bin/sh", "-c", "id -u; test -r /etc/shadow; echo $?"])
    bundle = await world.store.publish("bundle.tests", bundle_of(files, mode=0o755))
    spec = AgentSpec(bundle=bundle, command=entry, environment={"PATH": ".:/usr/bin:/bin"})
    ended = await world.run(await world.store.publish("agent.tests", spec.SerializeToString()), {}, max_attempts=1)
    assert ended.kind != "AGENT_ERROR", ended.message
    uid, unreadable = ended.output.decode().split()[:2]
    assert (int(uid) != 0 or os.geteuid() != 0, unreadable) == (True, "1")
