"""Code of a client that builds a policy reaches nothing of the algorithm service, and what it leaves is data."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.rpc.channel import open_channel
from fulmen_algorithm.clients import forked_child
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.clients.model_builder import BuildLimits, ModelBuilder
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_service_kit.isolation.launch import Isolator
from fulmen_service_kit.isolation.levels import Isolation
from fulmen_service_kit.security.tokens import Role
from tests.support.isolation import sandboxed
from tests.support.runner.harness import bundle_of, token
from tests.support.runner.stores import RealStore
from tests.support.service_kit.processes import ServiceProcess, serving_process

pytestmark = pytest.mark.long(short=True)

LIMIT_S = 90
MIB = 2**20
SETTING = "FULMEN_ALGORITHM_ISOLATION"
FORKED = "forked"
"""The level `trusted`, in a fork of a fork server."""

forked = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has fork servers")
LEVELS = ["trusted", pytest.param(FORKED, marks=forked), pytest.param("sandbox", marks=sandboxed)]

SPY = """
import glob, json, os, signal, sys

def tried(call):
    try:
        return repr(call())[:60]
    except BaseException as error:
        return type(error).__name__

def build(output, seed):
    service, secret, state = open("targets").read().split()
    service = int(service)
    seen = {
        "variables": [name for name in os.environ if name.startswith("FULMEN_")],
        "environment": tried(lambda: open(f"/proc/{service}/environ", "rb").read(9)),
        "parent": tried(lambda: b"TOKEN" in open(f"/proc/{os.getppid()}/environ", "rb").read()),
        "memory": tried(lambda: open(f"/proc/{service}/mem", "rb")),
        "key": tried(lambda: open(secret).read()),
        "runs": tried(lambda: os.listdir(state)),
        "kill": tried(lambda: os.kill(service, signal.SIGKILL)),
    }
    print("SEEN " + json.dumps(seen))
    sys.exit(3)
"""


def algorithm_service(store: RealStore, state: Path, **settings: str) -> AbstractAsyncContextManager[ServiceProcess]:
    """Runs the service with its token in the environment."""
    values = {
        "token": token(Role.SERVICE),
        "port": 0,
        "metrics_port": 0,
        "state_dir": state,
        "store_target": store.target,
        # There is no proxy, and this one says so at once.
        "llm_proxy_target": store.target,
    }
    return serving_process("fulmen_algorithm", values | settings)


async def built(store: RealStore, service: ServiceProcess, files: dict[str, str]) -> pb.TrainingRun:
    """Creates a run whose policy a function builds; returns the run when it has ended."""
    demonstrations = b'{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}'
    draft = pb.TrainingRun(algorithm="sft", settings_json='{"steps": 1}', policy=pb.PolicySpec(name="p"))
    draft.policy.build = "spy.py:build"
    draft.inputs["bundle"] = await store.publish("bundle.spy", bundle_of(files))
    draft.inputs["demonstrations"] = await store.publish("dataset.demonstrations", demonstrations)
    async with open_channel(f"127.0.0.1:{service.port}", token=token(Role.CLIENT)) as channel:
        runs = TrainingRunServiceStub(channel)
        run = (await runs.CreateTrainingRun(service_pb.CreateTrainingRunRequest(training_run=draft))).training_run
        async with asyncio.timeout(LIMIT_S):
            while run.state not in (pb.TRAINING_RUN_STATE_FAILED, pb.TRAINING_RUN_STATE_SUCCEEDED):
                await asyncio.sleep(0.1)
                run = (await runs.GetTrainingRun(service_pb.GetTrainingRunRequest(name=run.name))).training_run
    return run


@sandboxed
async def test_a_builder_finds_no_token_no_key_and_no_other_run_and_kills_nothing(
    database_url: str, tmp_path: Path
) -> None:
    secret = tmp_path / "signing.key"
    secret.write_text("a signing key of 32 bytes and more")
    secret.chmod(0o600)
    state = tmp_path / "state"
    async with RealStore(database_url) as store, algorithm_service(store, state) as service:
        run = await built(store, service, {"spy.py": SPY, "targets": f"{service.pid} {secret} {state}"})
        assert Path(f"/proc/{service.pid}").exists()
    seen = json.loads(run.failure_message.split("SEEN ")[1].splitlines()[0])
    denied = {"FileNotFoundError", "PermissionError", "ProcessLookupError"}
    assert seen.pop("variables") == []
    parent = seen.pop("parent")
    assert parent in denied | {"False"}
    assert set(seen.values()) <= denied, seen


async def test_where_containers_are_required_no_builder_runs(database_url: str, tmp_path: Path) -> None:
    async with (
        RealStore(database_url) as store,
        algorithm_service(store, tmp_path / "state", isolation="container") as service,
    ):
        run = await built(store, service, {"spy.py": SPY, "targets": "1 2 3"})
    assert (
        "spy.py:build is not run on this service: isolation must be at least `container` (FULMEN_ALGORITHM_ISOLATION)"
        in run.failure_message
    )


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    folder = tmp_path / "run"
    folder.mkdir()
    return RunFiles(folder)


@pytest.fixture(autouse=True)
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is loaded before is another test's: torch takes five seconds.
    monkeypatch.setattr(forked_child, "PRELOADED", "json")


@pytest.fixture
def builds() -> Iterator[Path]:
    """Yields a folder for the builders' files, which every user can enter."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o711)
        yield Path(place)


def builder(
    level: str, tmp_path: Path, *, folder: Path | None = None, modules: ModuleStarter | None = None, **limits: float
) -> ModelBuilder:
    isolation = Isolation.TRUSTED if level == FORKED else Isolation(level)
    isolator = Isolator(isolation, setting=SETTING, hidden=(tmp_path,))
    values = {"deadline_s": 60.0, "memory_bytes": 2048 * MIB, "disk_bytes": 64 * MIB, "torch_threads": 1} | limits
    return ModelBuilder(isolator, BuildLimits(**values), folder=folder, modules=modules)  # type: ignore[arg-type]  # Of two kinds of numbers.


async def outcome(level: str, files: RunFiles, tmp_path: Path, body: str, **limits: Any) -> str:
    """Builds with the body of a function; returns the error, or what is in the run's folder."""
    source = "import os, signal, subprocess, sys, time\ndef build(output, seed):\n" + "".join(
        f"    {line}\n" for line in body.splitlines()
    )
    modules = ModuleStarter(warm=True)
    try:
        built = builder(level, tmp_path, modules=modules if level == FORKED else None, **limits)
        await built.build(bundle_of({"b.py": source}), "b.py:build", files, seed=7)
    except RunFailed as error:
        return str(error)
    finally:
        modules.close()
    return " ".join(sorted(path.relative_to(files.initial).as_posix() for path in files.initial.rglob("*")))


@forked
async def test_a_trusted_builder_is_forked_with_what_is_loaded(files: RunFiles, tmp_path: Path) -> None:
    body = """
supervisor = int(open("/proc/self/stat").read().rpartition(") ")[2].split()[1])
server = int(open(f"/proc/{supervisor}/stat").read().rpartition(") ")[2].split()[1])
assert b"fulmen_service_kit.fork_server" in open(f"/proc/{server}/cmdline", "rb").read()
assert not any(name.startswith("FULMEN_") for name in os.environ)
open(output + "/config.json", "w").write("x")
"""
    assert await outcome(FORKED, files, tmp_path, body) == "config.json"


@pytest.mark.parametrize("level", LEVELS)
async def test_weights_and_configurations_are_taken_and_hidden_caches_are_not(
    level: str, files: RunFiles, tmp_path: Path
) -> None:
    body = """
os.makedirs(output + "/sub/.cache")
for name in ("config.json", "model.safetensors", "sub/merges.txt", "sub/.cache/lock"):
    open(os.path.join(output, name), "w").write(str(seed))
"""
    assert await outcome(level, files, tmp_path, body) == "config.json model.safetensors sub sub/merges.txt"
    assert (files.initial / "config.json").read_text() == "7"
    assert (files.initial / "config.json").stat().st_uid == os.geteuid()


# A trusted builder in a process of its own is read as one in a fork.
@pytest.mark.parametrize("level", [pytest.param("trusted", marks=pytest.mark.long), *LEVELS[1:]])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("open(output + '/pytorch_model.bin', 'w').write('x')", "not read as data: pytorch_model.bin"),
        ("open(output + '/modeling.py', 'w').write('x')", "not read as data: modeling.py"),
        ("os.symlink('/etc/passwd', output + '/config.json')", "not read as data: config.json"),
        ("os.mkfifo(output + '/config.json')", "not read as data: config.json"),
        (
            "open(output + '/a.json', 'w').write('x')\nos.link(output + '/a.json', output + '/b.json')",
            "not read as data: ",
        ),
        ("open(output + '/a.json', 'wb').truncate(100 << 20)", "File too large"),
        ("for n in range(90): open(f'{output}/{n}.json', 'wb').truncate(1 << 20)", "more than 10000 files or 67108864"),
        ("while True: print('x' * 100_000)", "printed more than"),
        ("time.sleep(60)", "took longer than 3 s"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with status 139"),
        ("raise ValueError('why')", "ValueError: why"),
        ("kept = [bytearray(b'x' * (64 << 20)) for _ in range(100)]", ""),
    ],
    ids=["pickle", "code", "link", "pipe", "hard link", "large", "many", "chatty", "slow", "crash", "error", "memory"],
)
async def test_what_is_no_data_or_too_much_fails_the_run_with_the_reason(
    level: str, files: RunFiles, tmp_path: Path, body: str, says: str
) -> None:
    memory = 1024 * MIB if "kept" in body else 8192 * MIB
    deadline_s = 3.0 if "sleep" in body else 60.0
    if level in ("trusted", FORKED) and "kept" in body:
        pytest.skip("trusted code has no limit of memory")
    told = await outcome(level, files, tmp_path, body, memory_bytes=memory, deadline_s=deadline_s)
    assert (says in told, files.initial.exists()) == (True, False), told
    if "kept" in body:
        assert "exceeded the memory limit" in told or "MemoryError" in told


DEEP = """
os.makedirs({place})
os.chdir({place})
for _ in range({depth}):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
"""


@sandboxed
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (DEEP.format(place="output + '/x'", depth=1100), "more than 32 folders deep"),
        (DEEP.format(place="output + '/.x'", depth=1100), ""),
        ("for n in range(10_001): open(f'{output}/{n}.json', 'w').close()", "more than 10000 files"),
        (r"open(os.fsencode(output) + b'/\xff.json', 'w').close()", r"not read as data: '\udcff.json'"),
        (r"open(output + '/a\nb\x1b[2J.json', 'w').close()", r"not read as data: 'a\nb\x1b[2J.json'"),
        ("open(output + '/a.json', 'w').close()\nos.chmod(output + '/a.json', 0)", ""),
        ("os.mkdir(output + '/sub')\nos.chmod(output + '/sub', 0)", ""),
        ("import socket\nsocket.socket(socket.AF_UNIX).bind(os.chdir(output) or 'a.json')", "not read as data: a.json"),
        ("os.symlink('..', output + '/sub')", "not read as data: sub"),
        ("os.rmdir(output)\nos.symlink('/etc', output)", ""),
        ("os.rmdir(output)", ""),
        ("os.execv('/bin/true', ['true'])", ""),
    ],
    ids=[
        "deep", "deep and hidden", "many files", "no text", "terminal", "unreadable file", "unreadable folder",
        "socket", "loop", "replaced", "removed", "another program",
    ],
)  # fmt: skip
async def test_whatever_a_builder_leaves_ends_in_data_or_a_reason(
    files: RunFiles, tmp_path: Path, builds: Path, body: str, says: str
) -> None:
    told = await outcome("sandbox", files, tmp_path, body, folder=builds)
    assert says in told
    assert told.isprintable() or "Traceback" in told, "it is shown in terminals, and sent as UTF-8"
    assert not list(builds.iterdir())


@sandboxed
async def test_a_builder_cannot_fill_the_disk_with_files_that_it_does_not_leave(
    files: RunFiles, tmp_path: Path
) -> None:
    body = """
for number in range(40):
    with open(os.path.join(os.environ["TMPDIR"], str(number)), "wb") as file:
        file.write(bytes(4 << 20))
time.sleep(30)
"""
    told = await outcome("sandbox", files, tmp_path, body)
    assert "more than 10000 files or 67108864 bytes" in told


@pytest.mark.parametrize("level", LEVELS)
async def test_nothing_that_a_builder_starts_outlives_it(level: str, files: RunFiles, tmp_path: Path) -> None:
    marker = f"7{os.getpid()}.5"
    body = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{marker}"])
    os._exit(0)
open(output + "/config.json", "w").write("x")
time.sleep(0.3)
"""
    assert await outcome(level, files, tmp_path, body) == "config.json"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if marker.encode() in command and b"sleep" in command]


@pytest.mark.parametrize(
    "archive",
    [b"no archive", bundle_of({"../b.py": ""}), bundle_of({"/".join(["d"] * 3000) + "/b.py": ""})],
    ids=["no archive", "a path out of it", "nested folders"],
)
async def test_a_malformed_bundle_fails_the_run_and_says_why(files: RunFiles, tmp_path: Path, archive: bytes) -> None:
    with pytest.raises(RunFailed, match=r"^The bundle of the policy cannot be unpacked: "):
        await builder("trusted", tmp_path).build(archive, "b.py:build", files, seed=7)
