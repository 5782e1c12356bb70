"""What an integration makes is accepted by `client.train` and has in its bundle what attempts need."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, cast

import pytest

from fulmen.agent import Context
from fulmen.integrations.chat import ModelCallFailed, complete
from fulmen.integrations.environments import Environment, EnvironmentInvalid, agent_config, imported, wrapped
from fulmen.integrations.harbor import convert
from fulmen.rpc.services import Services
from fulmen.train_toml.agent import AgentConfig
from fulmen.training.given import given_training
from fulmen.training.training import Training
from tests.support.environments.harbor.tasks import write_tasks


async def training_of(made: Environment) -> Training:
    """Returns the training of an environment, as `client.train(**made.training(), algorithm="grpo", base="hf:a/b")` makes it."""
    arguments = made.training()
    given: dict[str, Any] = {"reward": None, "validation": None, "base": "hf:acme/tiny", "algorithm": "grpo"}
    given |= {name: arguments.pop(name) for name in ("agent", "tasks")}
    return await given_training(cast(Services, None), "projects/default", given, cast(Any, arguments))


async def test_an_agent_that_is_a_name_of_a_module_needs_no_files() -> None:
    agent = agent_config("fulmen.integrations.gymnasium:play", AgentConfig(isolation="process"))
    made = Environment(agent=agent, tasks=(wrapped({"id": "Lake-v1", "seed": 3}, number=0),), model="lake")

    training = await training_of(made)

    assert training.config.policy.name == "lake"
    assert training.config.agent == agent
    assert agent.isolation == "process"
    assert training.bundle.files == ()


async def test_harbors_bundle_has_the_tasks_the_program_and_the_agent_but_no_solution(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/ask.py").write_text("print(1)\n")

    made = convert(
        tmp_path / "tasks/triple-4", command=["python", "/agent/ask.py"], model="m", agent_folder=tmp_path / "mine"
    )
    training = await training_of(made)

    with tarfile.open(fileobj=io.BytesIO(training.bundle.content)) as bundle:
        names = {name for name in bundle.getnames() if "." in Path(name).name}
    of_task = {"files/.keep", "files/data/numbers.txt", "instruction.md", "settings.json", "tests/test.sh"}
    assert names == {"harbor_attempt.py", "agent/ask.py", *(f"tasks/triple-4/{name}" for name in of_task)}


def harbor_task(folder: Path, *, dockerfile: str = "", toml: str = "") -> Path:
    task = folder / "task"
    for name, text in {
        "task.toml": toml, "instruction.md": "Do it.", "tests/test.sh": "#!/bin/sh\n", "environment/numbers.txt": "1\n",
        "environment/Dockerfile": dockerfile,
    }.items():  # fmt: skip
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return task


@pytest.mark.parametrize(
    ("dockerfile", "toml", "problem"),
    [
        ("COPY numbers.txt ../../../../outside.txt", "", "is outside of the working directory /app"),
        ("COPY numbers.txt a/../../outside.txt", "", "is outside of the working directory /app"),
        ("COPY numbers.txt /etc/outside.txt", "", "is outside of the working directory /app"),
        ("COPY ../tests/test.sh x", "", "there is no ../tests/test.sh in environment/"),
        ("WORKDIR ../..\nCOPY numbers.txt x", "", "must be an absolute path below /"),
        ("", '[environment]\nworkdir = "here"', "must be an absolute path below /"),
        ("COPY 'numbers.txt x", "", "environment/Dockerfile:1: a quotation has no end"),
        ("ENV PATH=/app/bin:$PATH", "", "environment/Dockerfile:1: variables are not substituted"),
        ("", "[environment]\nenv = 3", "environment.env must be a table"),
        ("", "[verifier]\nenv = { A = [1] }", "verifier.env must be a table"),
        ("", "[agent]\ntimeout_sec = inf", "agent.timeout_sec must be at most 2592000"),
        ("", f"[agent]\ntimeout_sec = 1{'0' * 400}", "agent.timeout_sec must be at most 2592000"),
        ("", f"a = 1{'0' * 5000}", "task.toml is not TOML"),
        ("", f"a = {'[' * 5000}{']' * 5000}", "task.toml is not TOML"),
    ],
)
def test_a_harbor_task_of_somebody_else_that_is_hostile_or_broken_is_refused(
    tmp_path: Path, dockerfile: str, toml: str, problem: str
) -> None:
    with pytest.raises(EnvironmentInvalid) as refused:
        convert(harbor_task(tmp_path, dockerfile=dockerfile, toml=toml), command=["true"], model="m")
    assert any(problem in each for each in refused.value.problems), refused.value.problems


@pytest.mark.parametrize("place", ["tests/leak", "environment/leak", "instruction.md"])
def test_links_of_a_harbor_task_lead_to_no_file_of_who_takes_it(tmp_path: Path, place: str) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key").write_text("secret")
    for target in ("private/key", "private", "nothing", "task"):
        task = harbor_task(tmp_path)
        (task / place).unlink(missing_ok=True)
        (task / place).symlink_to(tmp_path / target)
        with pytest.raises(
            EnvironmentInvalid, match=f"{place} (is a link that leads to no file of the task|is missing)"
        ):
            convert(task, command=["true"], model="m")
        (task / place).unlink()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.parametrize(
    "left",
    [
        "ln -s /tmp /logs/verifier",
        "echo 9 > /logs/verifier",
        "mkdir -p /logs/verifier/reward.json/in",
        "mkdir /logs/verifier && echo 9 > /logs/verifier/reward.txt && chmod 555 /logs/verifier /logs",
    ],
)
def test_whatever_an_agent_leaves_in_the_place_of_the_rewards_those_of_the_tests_count(
    tmp_path: Path, left: str
) -> None:
    task = harbor_task(tmp_path, dockerfile="COPY numbers.txt .")
    (task / "tests/test.sh").write_text("#!/bin/sh\ncp /app/numbers.txt /logs/verifier/reward.txt\n")
    made = convert(task, command=["sh", "-c", left], model="m")
    told = {"FULMEN_TASK": json.dumps(made.tasks[0]), "FULMEN_WORK_DIR": str(tmp_path)}
    printed = [
        subprocess.run(
            [sys.executable, "harbor_attempt.py", *words],
            cwd=made.folder,
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for words in (made.agent.command[2:], ["grade"])
    ]
    assert json.loads(printed[1]) == {"reward": 1.0}


def test_the_present_folder_can_be_a_harbor_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(harbor_task(tmp_path))
    assert convert(".", command=["true"], model="m").tasks[0]["environment"]["name"] == "task"


def test_a_library_that_is_missing_says_what_to_install() -> None:
    with pytest.raises(EnvironmentInvalid, match=r"pip install no-such-package, here and in the agent's environment"):
        imported("no_such_package", "no-such-package")


def test_a_model_that_cannot_be_reached_is_an_error_of_the_attempt() -> None:
    environment = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "key"}
    context = Context(rollout="r", attempt="a", attempt_number=1, mode="train", deadline=0.0, environment=environment)

    with pytest.raises(ModelCallFailed, match="URLError"):
        complete(context, "m", [{"role": "user", "content": "hi"}])
