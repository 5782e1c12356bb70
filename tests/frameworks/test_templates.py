"""What `fulmen init` writes for a framework works with that framework, as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fulmen_cli.init.commands import write_project
from fulmen_cli.init.template import Framework
from tests.support.frameworks.world import ENVIRONMENTS, QUIET

LIMIT_S = 90
# The framework's packages are in an environment of their own, in which the agent is a program.
ENVIRONMENT_OF = {Framework.LANGGRAPH: "langchain", Framework.OPENAI_AGENTS: "openai_agents"}


@pytest.mark.parametrize("framework", ENVIRONMENT_OF)
def test_a_new_project_passes_the_check_with_the_fake_model_as_it_is(tmp_path: Path, framework: Framework) -> None:
    write_project(tmp_path, framework=framework)
    task = (tmp_path / "tasks/train.jsonl").read_text().splitlines()[0]
    check = [sys.executable, "-m", "fulmen_cli", "agent", "check", "--command", "--fake-model", "--output", "json"]
    agent = [str(ENVIRONMENTS / ENVIRONMENT_OF[framework] / "bin/python"), "agent.py"]

    done = subprocess.run(
        [*check, "--input", task, "--grader", "grader.py:grade", "--", *agent],
        cwd=tmp_path, env=QUIET | {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    [attempt] = json.loads(done.stdout)
    assert len(attempt["model_calls"]) == 2
    assert [each["value"] for each in attempt["rewards"]] == [1.0]
