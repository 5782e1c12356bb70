"""Harbor's tasks as a command agent with a grader: fifty score as in Harbor itself, whose scores were recorded.

The record was made by tests/support/environments/harbor/record.py with Harbor 0.26.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen.integrations.environments import EnvironmentInvalid
from fulmen.integrations.harbor import convert
from tests.support.environments.episodes import scored_by
from tests.support.environments.harbor.tasks import AGENT, said, write_tasks
from tests.support.frameworks.traced import Stage, a_stage
from tests.support.runner.harness import bundle_of, spec_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1300)]

SCORES = json.loads(Path(__file__).with_name("data").joinpath("harbor_scores.json").read_text(encoding="utf-8"))
COMMAND = ("python", "/agent/ask.py")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Yields a store, the scripted model and a proxy."""
    async with a_stage(lambda body: said(body["messages"][-1]["content"])) as stage:
        yield stage


@pytest.fixture
def agent_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "ask.py").write_text(AGENT, encoding="utf-8")
    return folder


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
async def test_fifty_tasks_score_as_in_harbor(stage: Stage, tmp_path: Path, agent_folder: Path) -> None:
    write_tasks(tmp_path / "tasks")
    made = convert(tmp_path / "tasks", command=COMMAND, model="tiny", agent_folder=agent_folder)
    assert made.folder is not None
    files = {str(path.relative_to(made.folder)): path.read_text() for path in made.folder.rglob("*") if path.is_file()}

    def spec(bundle: str) -> bytes:
        return spec_of(bundle=bundle, command=made.agent.command, command_grader=made.agent.grader_command)

    done = await scored_by(stage, bundle_of(files), spec, made.tasks)

    assert done.failures == []
    names = [task["environment"]["name"] for task in made.tasks]
    found = {name: done.rewards(number) for number, name in enumerate(names)}
    # Fulmen's dimensions are lower case, without blanks.
    expected = {
        name: {key.lower().replace(" ", "-"): value for key, value in each.items()} for name, each in SCORES.items()
    }
    assert found == expected
    assert {each["reward"] for each in found.values()} == {0.0, 0.5, 1.0}
    assert not any("solution" in name for name in files)


async def test_tasks_that_cannot_run_are_refused_with_every_problem_and_nothing_is_made(tmp_path: Path) -> None:
    first, second, *_ = write_tasks(tmp_path)
    (first / "tests/test.sh").unlink()
    (first / "task.toml").write_text('steps = [{name = "a"}]\n[environment]\ngpus = 1\n[agent]\ntimeout_sec = "long"\n')
    dockerfile = "FROM debian\nRUN apt-get install gcc\nCOPY numbers.txt /etc/\nCOPY gone.txt .\n"
    (second / "environment/Dockerfile").write_text(dockerfile)

    with pytest.raises(EnvironmentInvalid) as error:
        convert([first, second, tmp_path / "none"], command=(), model="")

    assert str(error.value).splitlines()[1:] == [
        "model: it has no name",
        "command: it is empty",
        "triple-0: tests/test.sh is missing",
        "triple-0: task.toml: steps: tasks of several steps are not supported",
        "triple-0: task.toml: environment.gpus: the environment needs a container, and only files are supported",
        "triple-0: task.toml: agent.timeout_sec must be a positive number, not 'long'",
        "triple-1: environment/Dockerfile:2: RUN needs an image, and only files are supported",
        "triple-1: environment/Dockerfile:3: /etc/ is outside of the working directory /app",
        "triple-1: environment/Dockerfile:4: there is no gone.txt in environment/",
        "none: instruction.md is missing",
        "none: tests/test.sh is missing",
        "none: task.toml is missing",
    ]
