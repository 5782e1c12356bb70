"""Agents with packages of their own: environments built from requirements, and environments of the machine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fulmen.runner.v1.agent_spec_pb2 import Isolation
from tests.support.isolation import sandboxed
from tests.support.runner.fixtures import World
from tests.support.runner.wheels import sha256_hex, wheel

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
COMMAND = """
import json, sys, shared_package, fulmen
fulmen.emit_reward(0.25, dimension="emitted")
print(json.dumps({"reward": float(shared_package.VERSION), "prefix": float(sys.prefix != sys.base_prefix)}))
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
LIMIT = {"max_attempts": 1, "timeout_s": 90}
OWN = ("requirements", "venv")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Returns a folder with two versions of a package."""
    folder = tmp_path / "packages"
    folder.chmod(0o755) if folder.exists() else None
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


@pytest.mark.parametrize("isolation", ["trusted", pytest.param("sandbox", marks=sandboxed)])
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
        files("1.0", **{"more.txt": ""}), python="agent.py:solve", python_grader="agent.py:grade", requirements="requirements.txt"
    )
    assert (await world.run(again, {}, **LIMIT)).message == ""
    events = [line["event"] for line in runner.log]
    assert (events.count("venv_built"), events.count("venv_reused")) == (2, 1)
