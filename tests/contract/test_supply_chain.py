"""Licences are checked, images are named by digest, and the release workflow calls commands that exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

LIMIT_S = 60
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def licences(repository_root: Path) -> ModuleType:
    """Returns the program behind `make licences`."""
    spec = importlib.util.spec_from_file_location("fulmen_licences", repository_root / "tools/licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "licence",
    ["MIT", "Apache-2.0 AND MIT", "GPL-3.0 OR MIT", "MIT AND (GPL-3.0 OR MIT)", "MIT License; Apache Software License"],
)
def test_permissive_licences_and_alternatives_are_allowed(licences: ModuleType, licence: str) -> None:
    assert licences.refused([("one", licence)]) == []


@pytest.mark.parametrize(
    "licence",
    ["GPL-3.0", "MIT AND AGPL-3.0", "UNKNOWN", "", "GPL-2.0 OR AGPL-3.0", "(MIT OR ISC) AND GPL-3.0", "MIT;GPL-3.0"],
)
def test_any_other_licence_is_refused_by_name(licences: ModuleType, licence: str) -> None:
    [line] = licences.refused([("one", licence), ("two", "MIT")])
    assert "one" in line


def images_written(repository_root: Path, folder: Path, answer: str) -> subprocess.CompletedProcess[str]:
    """Runs the program with a `docker` that gives an answer."""
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    command = [sys.executable, repository_root / "tools/image_digests.py", "--output", folder / "images.env"]
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_every_third_party_image_of_compose_is_named_by_its_digest(repository_root: Path, tmp_path: Path) -> None:
    assert images_written(repository_root, tmp_path, f"echo {DIGEST}").returncode == 0
    written = dict(line.split("=", 1) for line in (tmp_path / "images.env").read_text().splitlines())
    texts = [path.read_text() for path in sorted((repository_root / "deploy").glob("docker-compose*.yml"))]
    assert written.keys() == {name for text in texts for name in re.findall(r"\$\{(FULMEN_\w+_IMAGE):-", text)}
    assert all(image.endswith(f"@{DIGEST}") for image in written.values())


@pytest.mark.parametrize("answer", ["echo no such host >&2; exit 1", "echo latest"])
def test_nothing_is_written_if_a_registry_does_not_answer(repository_root: Path, tmp_path: Path, answer: str) -> None:
    done = images_written(repository_root, tmp_path, answer)
    assert done.returncode == 1
    assert "image_digests: " in done.stderr
    assert not (tmp_path / "images.env").exists()


def workflow(repository_root: Path, name: str) -> dict[str, Any]:
    """Returns a workflow."""
    text = (repository_root / ".github/workflows" / name).read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def steps(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps of all jobs, with a command for every entry of a matrix."""
    return [
        {**step, "run": step["run"].replace("${{ matrix.command }}", entry.get("command", ""))}
        if "run" in step
        else step
        for job in found["jobs"].values()
        for step in job.get("steps", [])
        for entry in job.get("strategy", {}).get("matrix", {}).get("include", [{}])
    ]


@pytest.mark.parametrize("name", ["test.yml", "release.yml"])
def test_workflows_call_what_exists_with_no_right_that_they_do_not_need(repository_root: Path, name: str) -> None:
    found = workflow(repository_root, name)
    commands = [step["run"] for step in steps(found) if "run" in step]
    targets = {target for command in commands for target in re.findall(r"make ([a-z-]+)", command)}
    programs = {program for command in commands for program in re.findall(r"\b(tools/\w+\.(?:sh|py))", command)}

    assert targets <= set(re.findall(r"^([a-z-]+):", (repository_root / "Makefile").read_text(), re.M))
    assert all((repository_root / program).exists() for program in programs)
    assert targets
    assert found["permissions"] == {}
    assert all("permissions" in job for job in found["jobs"].values())


def test_nothing_is_published_before_the_tests_and_a_strict_audit_have_passed(repository_root: Path) -> None:
    jobs = workflow(repository_root, "release.yml")["jobs"]

    assert "make audit STRICT=1" in [step.get("run") for step in jobs["audit"]["steps"]]
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    for name in ("pypi", "npm", "images"):
        assert {"test", "audit"} <= set(jobs[name]["needs"]), name


def test_ci_and_the_workflow_run_the_same_targets(repository_root: Path) -> None:
    targets = re.compile(r"make ([a-z-]+(?: [A-Z]+=\S+)*)")
    script = re.sub(r"^ *#.*", "", (repository_root / ".ci/run").read_text(encoding="utf-8"), flags=re.M)
    local = set(targets.findall(script))
    remote = {
        each for step in steps(workflow(repository_root, "test.yml")) for each in targets.findall(step.get("run", ""))
    }

    assert local - remote == {"clients"}  # built by the tests that need them
    assert remote - local == set()
