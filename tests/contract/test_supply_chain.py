"""Licences are checked, images are named by digest, and the release workflow calls commands that exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


def test_the_release_workflow_audits_strictly_and_calls_targets_that_exist(repository_root: Path) -> None:
    workflow = yaml.safe_load((repository_root / ".github/workflows/release.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = {target for command in commands for target in re.findall(r"make ([a-z-]+)", command)}
    assert "make audit STRICT=1" in commands
    assert targets <= set(re.findall(r"^([a-z-]+):", (repository_root / "Makefile").read_text(), re.M))
    assert workflow["permissions"] == {}
