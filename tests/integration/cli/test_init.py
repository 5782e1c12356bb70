"""`fulmen init`, as a newcomer types it: the files work as they are. `fulmen demo`, from an empty folder to a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributions import ROOT
from tests.support.soak import long_but

LIMIT_S = 60
# The others' environments are those of `make test-frameworks`, whose tests run the templates, too.
WITHOUT_ENVIRONMENT = ("plain", "command", "node")


def fulmen(folder: Path, *arguments: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a folder, with an environment whose Python is this one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "fulmen_cli", *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


@pytest.mark.parametrize(
    ("framework", "algorithm"),
    long_but(
        [("plain", "grpo"), ("command", "grpo"), ("node", "apo")],
        [(framework, algorithm) for framework in WITHOUT_ENVIRONMENT for algorithm in ("grpo", "apo")],
    ),
)
def test_a_new_project_passes_the_check_with_the_fake_model_as_it_is(
    tmp_path: Path, framework: str, algorithm: str
) -> None:
    written = fulmen(tmp_path, "init", "--framework", framework, "--algorithm", algorithm)
    assert written.returncode == 0, written.stderr
    assert "fulmen agent check train.toml --fake-model" in written.stdout

    done = fulmen(tmp_path, "agent", "check", "train.toml", "--fake-model", "--times", "2", "--output", "json")

    assert done.returncode == 0, done.stdout + done.stderr
    for attempt in json.loads(done.stdout):
        assert attempt["failure"] is None
        # The fake model has called the tool with the number of the question, and repeated what it said.
        assert len(attempt["model_calls"]) == 2
        assert attempt["rewards"] == [{"dimension": "reward", "step": None, "span_id": "", "value": 1.0}]


@pytest.mark.serial
@pytest.mark.long(short=True)
@pytest.mark.timeout(400)
def test_the_demo_trains_from_an_empty_folder_without_a_checkout(short_tmp_path: Path) -> None:
    steps = ["--set", "sft.steps=20", "--set", "sft.warmup_steps=2", "--set", "grpo.steps=2"]
    done = fulmen(short_tmp_path, "demo", "d", *steps, limit_s=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation accuracy" in done.stdout
    assert "Stopped." in done.stdout
    assert str(ROOT) not in (short_tmp_path / "d/train.toml").read_text()
    assert fulmen(short_tmp_path, "status", "--state-dir", "d/.fulmen").returncode != 0, "the stack still runs"
