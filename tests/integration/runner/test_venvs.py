"""Agents with packages of their own: environments built from requirements, and environments of the machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import opentelemetry.trace
import pytest

from tests.support.isolation import NO_SANDBOX, sandboxed
from tests.support.runner.fixtures import World
from tests.support.runner.harness import RunnerProcess, rollouts_of
from tests.support.runner.wheels import ClosedIndex, other_pythons, sha256_hex, wheel

AGENT = """
import json, os, sys
import shared_package
from fulmen import emit_annotation, emit_reward
from fulmen.agent import current

def solve(task, context):
    emit_reward(0.5, dimension="format")
    emit_annotation({"seen": True})
    assert current().rollout == context.rollout == os.environ["FULMEN_ROLLOUT"]
    return {"version": shared_package.VERSION, "python": list(sys.version_info[:2]), "prefix": sys.prefix,
            "path": os.environ["PATH"].split(":")[0], "home": os.environ["VIRTUAL_ENV"]}

def grade(task, outcome):
    return float(outcome["version"] == shared_package.VERSION)
"""
# Where there is a sandbox, what works in it works without it.
ISOLATION = [
    pytest.param("trusted", marks=() if NO_SANDBOX else pytest.mark.long),
    pytest.param("sandbox", marks=sandboxed),
]
COMMAND = """
import json, shutil, sys, shared_package, fulmen
fulmen.emit_reward(0.25, dimension="emitted")
fulmen.emit_message("no OpenTelemetry here")
own = sys.prefix != sys.base_prefix and shutil.which("python").startswith(sys.prefix)
print(json.dumps({"reward": float(shared_package.VERSION), "own": float(own)}))
"""
MODEL = """
import http.client, json, os
from urllib.parse import urlsplit
import shared_package

class Client:
    key = os.environ["OPENAI_API_KEY"]  # Of the module's import: not yet that of an attempt.

def solve(task, context):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"authorization": f"Bearer {Client.key}", "content-type": "application/json"}
    connection.request("POST", url.path + "/chat/completions", json.dumps({"model": "m"}), headers)
    return float(json.loads(connection.getresponse().read())["choices"][0]["message"]["content"] == context.attempt)
"""
HOSTILE = """
import os, shared_package, sys
from pathlib import Path
from fulmen import emit_reward

def can_write(path):
    try:
        os.chmod(path, 0o777)
    except OSError:
        pass
    try:
        path.write_text("mine") if path.is_file() else (path / "mine").write_text("mine")
    except OSError:
        return False
    return True

def solve(task):
    emit_reward(1)
    own = Path(shared_package.__file__)
    targets = [own, own.parent, Path(sys.prefix), Path(sys.prefix, "bin"), Path(sys.prefix, "pyvenv.cfg")]
    venvs = Path(task["venvs"])
    return {"written": sum(map(can_write, targets)), "environments": len(list(venvs.iterdir())),
            "complete": len(list(venvs.glob("*/complete.json"))),
            "private": [each.name for each in Path(task["private"]).iterdir() if not each.name.startswith("fulmen-runner-")]}
"""
LIMIT = {"max_attempts": 1, "timeout_s": 90}
OTHER_PYTHONS = other_pythons()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Returns a folder with two versions of a package."""
    folder = tmp_path / "packages"
    wheel(folder, "shared_package", "1.0")
    wheel(folder, "shared_package", "2.0")
    return folder


@pytest.fixture
def settings(tmp_path: Path, packages: Path) -> dict[str, str]:
    """Returns the settings of a runner that installs from that folder alone."""
    return {
        "package_index_url": "off",
        "package_folders": str(packages),
        "venvs_dir": str(tmp_path / "venvs"),
        "work_dir": str(tmp_path),
    }


def files(version: str, **more: str) -> dict[str, str]:
    return {"agent.py": AGENT, "requirements.txt": f"# ours\nshared-package == {version}\n", **more}


def environment(folder: Path, package: Path, python: str = sys.executable) -> Path:
    """Makes a virtual environment with a package."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(package), str(site)], check=True)
    return folder


@pytest.mark.parametrize("isolation", ISOLATION)
async def test_agents_with_conflicting_requirements_run_side_by_side_in_environments_that_are_built_once(
    world: World, settings: dict[str, str], isolation: str
) -> None:
    runner = await world.start(isolation=isolation, **settings)
    agents = [
        await world.publish(
            files(version), python="agent.py:solve", python_grader="agent.py:grade", requirements="requirements.txt"
        )
        for version in ("1.0", "2.0")
    ]
    ended = await asyncio.gather(*(world.run(agent, {}, **LIMIT) for agent in agents))

    assert [each.message for each in ended] == ["", ""]
    assert [each.rewards for each in ended] == [{("reward", None): 1.0, ("format", None): 0.5}] * 2
    outcomes = [json.loads(each.output) for each in ended]
    assert [each["version"] for each in outcomes] == ["1.0", "2.0"]
    assert outcomes[0]["prefix"] != outcomes[1]["prefix"]
    assert all(each["path"] == f"{each['home']}/bin" for each in outcomes)

    # Another version of the first agent, with the same requirements.
    again = await world.publish(
        files("1.0", **{"more.txt": ""}),
        python="agent.py:solve",
        python_grader="agent.py:grade",
        requirements="requirements.txt",
    )
    assert (await world.run(again, {}, **LIMIT)).message == ""
    events = [line["event"] for line in runner.log]
    assert (events.count("venv_built"), events.count("venv_reused")) == (2, 1)
    port = (await runner.ports())["metrics_port"]
    metrics = (await asyncio.to_thread(urlopen, f"http://127.0.0.1:{port}/metrics")).read().decode()
    assert 'fulmen_runner_venvs_total{how="built"} 2.0' in metrics
    assert 'fulmen_runner_venvs_total{how="reused"} 1.0' in metrics
    # What a build made is the runner's, whoever built it, and nobody may write it.
    made = [path.lstat() for path in Path(settings["venvs_dir"]).glob("*/venv/**/*") if not path.is_symlink()]
    assert {status.st_uid for status in made} == {os.geteuid()}
    assert not [status for status in made if status.st_mode & 0o222]


@pytest.mark.parametrize("isolation", ISOLATION)
async def test_a_command_finds_its_packages_its_programs_and_the_sdk(
    world: World, settings: dict[str, str], isolation: str
) -> None:
    await world.start(isolation=isolation, **settings)
    agent = await world.publish(
        files("2.0") | {"agent.py": COMMAND}, command=("python", "agent.py"), requirements="requirements.txt"
    )
    ended = await world.run(agent, {}, **LIMIT)
    assert (ended.message, ended.rewards) == ("", {("reward", None): 2.0, ("own", None): 1.0, ("emitted", None): 0.25})


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("python", [sys.executable, *OTHER_PYTHONS[:1]])
async def test_an_agent_runs_in_an_environment_of_the_machine_whatever_its_python(
    world: World, settings: dict[str, str], tmp_path: Path, packages: Path, isolation: str, python: str
) -> None:
    runner = await world.start(isolation=isolation, venv_folders=str(tmp_path), **settings)
    venv = environment(tmp_path / "own", packages / "shared_package-1.0-py3-none-any.whl", python)
    agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve", python_grader="agent.py:grade", venv=venv)
    ended = await world.run(agent, {}, **LIMIT)
    assert (ended.message, ended.rewards) == ("", {("reward", None): 1.0, ("format", None): 0.5})
    outcome = json.loads(ended.output)
    assert (outcome["version"], outcome["prefix"]) == ("1.0", str(venv))
    assert (outcome["python"] == list(sys.version_info[:2])) is (python == sys.executable)
    # It has no OpenTelemetry: its spans are missing, and the log says so.
    assert "opentelemetry" in (await runner.logged("agent_is_not_traced"))["reason"]


async def test_an_environment_with_opentelemetry_sends_its_spans(
    world: World, settings: dict[str, str], tmp_path: Path, packages: Path
) -> None:
    runner = await world.start(isolation="trusted", **settings)
    venv = environment(tmp_path / "own", packages / "shared_package-1.0-py3-none-any.whl")
    [site] = venv.glob("lib/python*/site-packages")
    assert opentelemetry.trace.__file__ is not None
    (site / "traced.pth").write_text(str(Path(opentelemetry.trace.__file__).parents[2]))
    agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve", python_grader="agent.py:grade", venv=venv)
    assert (await world.run(agent, {}, **LIMIT)).message == ""
    assert {"fulmen.reward", "fulmen.annotation"} <= {span.name for span in world.double.otlp_spans}
    assert "agent_is_not_traced" not in [line["event"] for line in runner.log]


async def test_model_calls_carry_the_attempts_key_without_opentelemetry(world: World, settings: dict[str, str]) -> None:
    await world.start(isolation="trusted", **settings)
    agent = await world.publish(
        files("1.0") | {"agent.py": MODEL}, python="agent.py:solve", requirements="requirements.txt"
    )
    for _ in range(2):
        ended = await world.run(agent, {}, **LIMIT)
        assert (ended.message, ended.rewards) == ("", {("reward", None): 1.0})


@sandboxed
async def test_a_sandboxed_agent_neither_changes_its_environment_nor_sees_that_of_another(
    world: World, settings: dict[str, str], tmp_path: Path
) -> None:
    await world.start(isolation="sandbox", **settings)
    other = await world.publish(
        files("2.0"), python="agent.py:solve", python_grader="agent.py:grade", requirements="requirements.txt"
    )
    assert (await world.run(other, {}, **LIMIT)).message == ""
    agent = await world.publish(
        files("1.0") | {"agent.py": HOSTILE}, python="agent.py:solve", requirements="requirements.txt"
    )
    ended = await world.run(agent, {"venvs": settings["venvs_dir"], "private": str(tmp_path)}, **LIMIT)
    assert (ended.message, json.loads(ended.output)) == (
        "",
        {"written": 0, "environments": 1, "complete": 0, "private": ["venvs"]},
    )


@sandboxed
async def test_a_tenant_opens_no_folder_of_the_machine_by_calling_it_an_environment(
    world: World, settings: dict[str, str], tmp_path: Path, packages: Path
) -> None:
    venv = environment(tmp_path / "private", packages / "shared_package-1.0-py3-none-any.whl")
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link").symlink_to(venv)
    await world.start(isolation="sandbox", venv_folders=str(allowed), **settings)
    for name in (venv, allowed / "link", "/", allowed / ".." / "private", "relative"):
        agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve", venv=str(name))
        ended = await world.run(agent, {}, **LIMIT)
        assert ended.kind == "AGENT_ERROR"
        assert "FULMEN_RUNNER_VENV_FOLDERS" in ended.message or "absolute path" in ended.message


async def test_an_environment_that_is_not_there_is_the_agents_error_with_the_remedy(
    world: World, settings: dict[str, str], tmp_path: Path
) -> None:
    await world.start(isolation="trusted", **settings)
    agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve", venv=tmp_path / "missing")
    ended = await world.run(agent, {}, **LIMIT)
    assert ended.kind == "AGENT_ERROR"
    assert ended.message.startswith(
        f"virtual environment {tmp_path}/missing cannot be used on this runner: No such file"
    )
    assert "give `requirements` instead" in ended.message


async def test_hostile_requirements_are_refused_with_every_line_and_nothing_is_built(
    world: World, settings: dict[str, str], tmp_path: Path
) -> None:
    lines = (
        "-e /etc",
        "--index-url http://evil",
        "file:///etc/passwd",
        "x @ git+ssh://host/x",
        "-r /etc/passwd",
        "./local",
        "a.whl",
    )
    runner = await world.start(isolation="trusted", **settings)
    agent = await world.publish(
        files("1.0", **{"requirements.txt": "\n".join(lines)}), python="agent.py:solve", requirements="requirements.txt"
    )
    ended = await world.run(agent, {}, **LIMIT)
    assert ended.kind == "AGENT_ERROR"
    assert [f"requirements.txt line {n}: {line!r}" in ended.message for n, line in enumerate(lines, 1)] == [True] * len(
        lines
    )
    assert "venv_build_started" not in [line["event"] for line in runner.log]
    assert not list(tmp_path.glob("venvs/*/venv"))


async def test_requirements_outside_the_bundle_are_not_read(
    world: World, settings: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("hunter2\n")
    await world.start(isolation="trusted", **settings)
    for name in ("../../secret.txt", str(tmp_path / "secret.txt"), "missing.txt", "."):
        agent = await world.publish({"agent.py": AGENT, "a/b": ""}, python="agent.py:solve", requirements=name)
        ended = await world.run(agent, {}, **LIMIT)
        assert (ended.kind, ended.message) == (
            "AGENT_ERROR",
            f"requirements file {name!r} is not in the agent's bundle",
        )


async def test_a_failed_build_says_why_without_the_password_of_the_index_and_is_not_repeated_at_once(
    world: World, settings: dict[str, str]
) -> None:
    with ClosedIndex() as index:
        url = {"package_index_url": f"http://user:p%40ssw0rd@127.0.0.1:{index.port}/simple"}
        runner = await world.start(isolation="trusted", **settings | url)
        await _fail_to_build(world, runner)
    assert index.asked == [("/simple/shared-package/", "Basic dXNlcjpwQHNzdzByZA==")]


async def _fail_to_build(world: World, runner: RunnerProcess) -> None:
    agent = await world.publish(files("3.0"), python="agent.py:solve", requirements="requirements.txt")
    ended = await world.attempts(agent, [{}, {}], timeout_s=90, max_attempts=2)
    attempts = [each for attempts in ended for each in attempts]
    assert [each.kind for each in attempts] == ["AGENT_ERROR"] * len(attempts)
    assert all("requirements of the agent cannot be installed" in each.message for each in attempts)
    assert all("shared-package" in each.message for each in attempts)
    assert not [each for each in attempts if "ssw0rd" in each.message]
    assert not [line for line in runner.tail if "ssw0rd" in line]
    assert [line["event"] for line in runner.log].count("venv_build_started") == 1


async def test_locked_requirements_are_held_to_their_hashes(
    world: World, settings: dict[str, str], packages: Path
) -> None:
    await world.start(isolation="trusted", **settings)
    right = sha256_hex(packages / "shared_package-1.0-py3-none-any.whl")
    for digest, message in ((right, ""), ("0" * 64, "requirements of the agent cannot be installed")):
        locked = f"shared-package==1.0 \\\n    --hash=sha256:{digest}\n"
        agent = await world.publish(
            files("1.0", **{"requirements.txt": locked}),
            python="agent.py:solve",
            python_grader="agent.py:grade",
            requirements="requirements.txt",
        )
        assert (await world.run(agent, {}, **LIMIT)).message[:44] == message[:44]


async def test_a_runner_without_room_for_environments_refuses_requirements(
    world: World, settings: dict[str, str]
) -> None:
    await world.start(isolation="trusted", venvs_bytes=0, **settings)
    agent = await world.publish(files("1.0"), python="agent.py:solve", requirements="requirements.txt")
    ended = await world.run(agent, {}, **LIMIT)
    assert (ended.kind, "FULMEN_RUNNER_VENVS_BYTES=0" in ended.message) == ("AGENT_ERROR", True)


async def test_a_build_that_dies_with_its_runner_leaves_nothing_that_the_next_one_uses(
    world: World, settings: dict[str, str], tmp_path: Path, packages: Path
) -> None:
    wheel(packages, "large", "1.0", padding_bytes=200_000_000)
    first = await world.start(isolation="trusted", **settings)
    agent = await world.publish(
        files("1.0", **{"requirements.txt": "large==1.0\nshared-package==1.0\n"}),
        python="agent.py:solve",
        python_grader="agent.py:grade",
        requirements="requirements.txt",
    )
    running = asyncio.create_task(world.attempts(agent, [{}], timeout_s=90, max_attempts=3))
    await first.logged("venv_build_started")
    first.send(signal.SIGKILL)
    await first.exit_code()
    assert not list(tmp_path.glob("venvs/*/complete.json"))

    second = await world.start(isolation="trusted", **settings)
    [[*_, ended]] = await running
    assert (ended.message, json.loads(ended.output)["version"]) == ("", "1.0")
    assert [line["event"] for line in second.log].count("venv_built") == 1
    assert len(list(tmp_path.glob("venvs/*/venv"))) == 1


async def test_a_runner_that_is_stopped_ends_its_build_and_leaves_nothing(
    world: World, settings: dict[str, str], tmp_path: Path, packages: Path
) -> None:
    wheel(packages, "large", "1.0", padding_bytes=200_000_000)
    runner = await world.start(isolation="trusted", drain_grace_s=0, **settings)
    agent = await world.publish(
        files("1.0", **{"requirements.txt": "large==1.0\n"}), python="agent.py:solve", requirements="requirements.txt"
    )
    await world.store.create(rollouts_of(agent, [{}], timeout_s=90))
    await runner.logged("venv_build_started")
    runner.send(signal.SIGTERM)
    assert await runner.exit_code() == 0
    assert not list(tmp_path.glob("venvs/*/"))
