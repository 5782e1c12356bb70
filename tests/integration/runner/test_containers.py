"""Agents that are containers, on a real Docker engine; skipped where none answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import aiodocker
import pytest
import pytest_asyncio

from fulmen.runner.v1.agent_spec_pb2 import AgentSpec, ContainerEntry, Limits
from fulmen_runner.agents.templates import escaped
from tests.support.docker import (
    BASE_IMAGE,
    TEST_IMAGE,
    USER_ID,
    build_test_image,
    engine_address,
    require_engine,
)
from tests.support.runner.fixtures import World
from tests.support.runner.harness import RunnerProcess, bundle_of, rollouts_of
from tests.support.runner.stores import Ended

GONE_TIMEOUT_S = 20.0
MEBIBYTE = 1024 * 1024

INPUTS = """
import json, os, sys
task = json.load(sys.stdin)
assert json.load(open(sys.argv[1])) == task == json.loads(os.environ["FULMEN_TASK"]), "the inputs differ"
assert sys.argv[2] == "why" and os.environ["QUESTION"] == "why?", (sys.argv, os.environ["QUESTION"])
assert not [name for name in os.environ if name.startswith("FULMEN_RUNNER")], "a setting leaked"
assert os.getcwd() == "/fulmen/bundle" and open("data.txt").read() == "data", "not in the bundle"
for path in ("/fulmen/task", "/fulmen/bundle/data.txt", "/fulmen/bundle/new"):
    try:
        os.chmod(path, 0o777) if os.path.exists(path) else open(path, "w")
    except PermissionError:
        continue
    sys.exit(f"{path} can be changed")
work = sys.argv[3]
assert os.listdir(work) == []
open(work + "/mine", "w").write("x")
capabilities = [line for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd", "NoNewPrivs"))]
assert [line.split()[1].strip("0") for line in capabilities] == ["", "", "1"], capabilities
with open(os.environ["FULMEN_REWARDS_FILE"], "a") as file:
    file.write(json.dumps({"value": 0.25, "dimension": "style", "step": 3}) + "\\n")
print("thinking")
print(0.75)
"""
ASK = """
import json, os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", method="POST",
    data=json.dumps({"model": "m", "messages": []}).encode(),
    headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"mine": said == os.environ["FULMEN_ROLLOUT"] + "/attempts/1"}))
"""
FORKS = """
import os, time
for count in range(40):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except BlockingIOError:
        print(float(count < 20), flush=True)
        os._exit(0)
"""
HOG = "data = []\nwhile True: data.append(bytearray(8 << 20))"
FLOOD = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
IGNORES = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A container and what is to become of its attempt."""

    script: str = ""
    argv: tuple[str, ...] = ()
    image: str = BASE_IMAGE
    network: str = ""
    limits: Limits = field(default_factory=Limits)
    kind: str = ""
    says: str = ""
    rewards: Mapping[tuple[str, int | None], float] = field(default_factory=dict)
    timeout_s: float = 60

    def spec(self, bundle: str = "", environment: Mapping[str, str] | None = None) -> bytes:
        argv = self.argv or (("python", "-c", escaped(self.script)) if self.script else ())
        entry = ContainerEntry(image=self.image, argv=argv, network=self.network)
        spec = AgentSpec(bundle=bundle, container=entry, limits=self.limits, environment=environment or {})
        return spec.SerializeToString()


CASES = {
    "a model call through the host's network": Case(script=ASK, network="host", rewards={("mine", None): 1.0}),
    "the image's own command and user": Case(image=TEST_IMAGE, rewards={("reward", None): float(USER_ID)}),
    "a status": Case(
        script="import sys; sys.exit('gone wrong')", kind="AGENT_ERROR", says="status 1\ngone wrong"
    ),
    "a signal": Case(
        script="import os; os.kill(os.getpid(), 11)", kind="AGENT_ERROR", says="signal 11"
    ),
    "no reward": Case(script="print('done')", kind="REWARD_MISSING", says="agent succeeded"),
    "memory": Case(
        script=HOG, limits=Limits(memory_bytes=64 * MEBIBYTE), kind="AGENT_ERROR", says="memory limit of 67108864 bytes"
    ),
    "too many processes": Case(
        script=FORKS, limits=Limits(process_count=20), rewards={("reward", None): 1.0}
    ),
    "a flood": Case(script=FLOOD, kind="AGENT_ERROR", says="output limit"),
    "a secret on standard error": Case(
        script="import os, sys; sys.exit(os.environ['OPENAI_API_KEY'])", kind="AGENT_ERROR", says="[masked]"
    ),
    "a hang that ignores SIGTERM": Case(script=IGNORES, kind="TIMEOUT", says="timeout of 3 s", timeout_s=3),
    "no such image": Case(image="fulmen-tests/never-was:1", kind="AGENT_ERROR", says="is not present"),
    "no such program": Case(argv=("no-such-program",), kind="AGENT_ERROR", says="no-such-program"),
    "a network that is not given": Case(
        script="print(1)", network="bridge", kind="AGENT_ERROR", says="FULMEN_RUNNER_CONTAINER_NETWORKS"
    ),
    "an unknown member": Case(argv=("echo", "{task.nothing}"), kind="AGENT_ERROR", says="{task.nothing}"),
    "rewards that are none": Case(
        script="import os; open(os.environ['FULMEN_REWARDS_FILE'], 'w').write('much')",
        kind="AGENT_ERROR",
        says="ewards file",
    ),
    "a huge file of rewards": Case(
        script="import os; open(os.environ['FULMEN_REWARDS_FILE'], 'wb').truncate(1 << 30)",
        kind="AGENT_ERROR",
        says="exceeds",
    ),
}  # fmt: skip


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[aiodocker.Docker]:
    """Yields the engine, with the image that the tests run."""
    require_engine()
    await build_test_image()
    async with aiodocker.Docker(engine_address()) as docker:
        yield docker


async def containers_of(engine: aiodocker.Docker, names: list[str]) -> dict[str, str]:
    """Returns the state of the containers of rollouts, by attempt."""
    found = await engine.containers.list(all="true", filters='{"label": ["fulmen.attempt"]}')
    attempts = {each._container["Labels"]["fulmen.attempt"]: each._container["State"] for each in found}
    return {attempt: state for attempt, state in attempts.items() if attempt.split("/attempts/")[0] in names}


async def until(engine: aiodocker.Docker, names: list[str], states: set[str]) -> None:
    """Waits until the containers of rollouts are in these states: those that there are, at least one for each state."""
    async with asyncio.timeout(GONE_TIMEOUT_S):
        while set((await containers_of(engine, names)).values()) != states:  # noqa: ASYNC110  # The engine is no child.
            await asyncio.sleep(0.1)


async def start(world: World, **settings: object) -> RunnerProcess:
    return await world.start(
        container_networks="none,host",
        container_pull="never",
        container_engine=engine_address(),
        **settings,
    )


async def test_what_becomes_of_containers(world: World, engine: aiodocker.Docker) -> None:
    bundle = await world.store.publish("bundle.tests", bundle_of({"data.txt": "data"}))
    inputs = Case(
        argv=("python", "-c", escaped(INPUTS), "{task_file}", "{task.question}", "{work_dir}"),
        rewards={("reward", None): 0.75, ("style", 3): 0.25},
    )
    specs = {name: case.spec() for name, case in CASES.items()}
    specs["inputs"] = inputs.spec(bundle, {"QUESTION": "{task.question}?"})
    cases = {**CASES, "inputs": inputs}
    names: dict[str, str] = {}
    for case_name, spec in specs.items():
        agent = await world.store.publish(f"agent.{len(names)}", spec)
        batch = rollouts_of(agent, [{"question": "why"}], timeout_s=cases[case_name].timeout_s, max_attempts=1)
        [names[case_name]] = await world.store.create(batch)
    await start(world, slots=4, max_command_output_bytes=MEBIBYTE)
    ended = await world.store.ended(list(names.values()))
    got = {case_name: ended[name][0] for case_name, name in names.items()}
    assert {case_name: str(got[case_name]) for case_name, case in cases.items() if not fits(got[case_name], case)} == {}
    assert await containers_of(engine, list(names.values())) == {}
    assert world.double.labels.get("runtime") == "docker"


def fits(got: Ended, case: Case) -> bool:
    """Returns True if an attempt ended as its case expects."""
    return got.kind == case.kind and case.says in got.message and got.rewards == case.rewards


async def test_a_cancelled_container_is_gone_and_so_are_those_of_a_killed_runner(
    world: World, engine: aiodocker.Docker
) -> None:
    agent = await world.store.publish("agent.tests", Case(script=IGNORES).spec())
    runner = await start(world)
    [cancelled, left] = await world.store.create(rollouts_of(agent, [{}, {}], timeout_s=600, max_attempts=1))
    await until(engine, [cancelled], {"running"})
    await world.store.cancel([cancelled])
    await until(engine, [cancelled], set())
    await until(engine, [left], {"running"})
    runner.send(signal.SIGKILL)
    await runner.exit_code()
    assert set((await containers_of(engine, [left])).values()) == {"running"}
    await start(world)
    await until(engine, [left], set())


async def test_nothing_but_the_work_directory_can_be_written_where_that_is_set(
    world: World, engine: aiodocker.Docker
) -> None:
    script = (
        "import os, sys\nopen(sys.argv[1] + '/a', 'w').close()\nopen('/tmp/a', 'w').close()\n"
        "try: open('/a', 'w')\nexcept OSError as error: print(float(error.errno == 30))"
    )
    agent = await world.store.publish("agent.tests", Case(argv=("python", "-c", script, "{work_dir}")).spec())
    await start(world, container_read_only=True)
    ended = await world.run(agent, {}, max_attempts=1)
    assert (ended.message, ended.rewards) == ("", {("reward", None): 1.0})


@pytest.mark.parametrize(
    ("address", "says"),
    [("unix:///nowhere/docker.sock", "FULMEN_RUNNER_CONTAINER_ENGINE"), ("off", "containers are disabled")],
)
async def test_without_an_engine_the_attempt_says_what_to_do(world: World, address: str, says: str) -> None:
    agent = await world.store.publish("agent.tests", Case(script="print(1)").spec())
    await world.start(container_engine=address)
    ended = await world.run(agent, {}, max_attempts=1)
    assert ended.kind == "INFRA"
    assert says in ended.message
    assert "runtime" not in world.double.labels
