"""What a training is given becomes the configuration that a `train.toml` would have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import fulmen
from fulmen.errors import ResourceNotFound
from fulmen.rpc.services import Services
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen.training.given import TrainOptions, given_training
from fulmen.training.training import Training

POLICY = "resources/policy.sums/versions/7"


class Store:
    """A store with one policy."""

    @property
    def resources(self) -> Store:
        """The stub of resources."""
        return self

    async def GetResources(
        self, request: resource_service_pb2.GetResourcesRequest
    ) -> resource_service_pb2.GetResourcesResponse:
        """Returns the newest version of `sums`."""
        if request.names[0] != "resources/policy.sums":
            raise ResourceNotFound(f"no {request.names[0]}")
        return resource_service_pb2.GetResourcesResponse(resources=[resource_pb2.ResourceVersion(name=POLICY)])


async def training(options: TrainOptions | None = None, **given: Any) -> Training:
    defaults: dict[str, Any] = {"agent": solve, "algorithm": "grpo", "reward": None, "base": None}
    defaults |= {"tasks": [{"input": 1}], "validation": None}
    services = cast(Services, Store())
    return await given_training(services, "projects/default", {**defaults, **given}, options or {})


def solve(task: Any) -> float:
    return 1.0


def build(output_directory: str, *, seed: int) -> None:
    """Builds nothing."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the folder of an agent that is a file."""
    (tmp_path / "my agent.py").write_text("def solve(task): return 1.0\n")
    (tmp_path / "agent.py").write_text("def solve(task): return 1.0\n")
    (tmp_path / "grader.py").write_text("def grade(task, outcome): return 1.0\n")
    return tmp_path


async def test_functions_are_targets_of_a_file_that_the_bundle_has() -> None:
    made = await training(reward=lambda task, outcome: 1.0, base=build)

    assert (made.config.agent.python, made.config.agent.grader) == (
        "fulmen_functions.py:agent",
        "fulmen_functions.py:reward",
    )
    assert made.config.policy.build == "fulmen_functions.py:base"
    assert {"fulmen_functions.py", "fulmen_functions.pickle", "cloudpickle/cloudpickle.py"} <= set(made.bundle.files)
    assert made.config.name == made.config.policy.name == "solve"


async def test_paths_are_relative_to_the_folder_that_the_bundle_takes(folder: Path) -> None:
    made = await training(agent=f"{folder}/agent.py:solve", reward=f"{folder}/grader.py:grade")

    assert (made.config.agent.python, made.config.agent.grader) == ("agent.py:solve", "grader.py:grade")
    assert {"agent.py", "grader.py"} <= set(made.bundle.files)
    assert made.config.name == "agent"


async def test_words_are_a_command(folder: Path) -> None:
    made = await training({"folder": folder}, agent="node agent.js --fast", reward=["python", "grader.py"])

    assert made.config.agent.command == ("node", "agent.js", "--fast")
    assert made.config.agent.grader_command == ("python", "grader.py")


async def test_a_policy_is_continued_from_its_newest_version_and_keeps_its_name() -> None:
    made = await training(base="sums")
    again = await training({"policy": "other"}, base=resource_pb2.ResourceVersion(name=POLICY))

    assert (made.config.policy.name, made.config.policy.version) == ("sums", POLICY)
    assert (again.config.policy.name, again.config.policy.version) == ("other", POLICY)


async def test_a_folder_holds_first_weights(folder: Path) -> None:
    made = await training(base=folder)

    assert made.config.policy.path == str(folder)


async def test_a_model_on_a_hub_holds_first_weights() -> None:
    made = await training(base="hf:Qwen/Qwen3-0.6B")
    pinned = await training(base="hf:Qwen/Qwen3-0.6B@v1.0")

    assert made.config.policy.base == "hf:Qwen/Qwen3-0.6B"
    assert pinned.config.policy.base == "hf:Qwen/Qwen3-0.6B@v1.0"


async def test_a_base_that_is_nothing_is_not_found() -> None:
    with pytest.raises(ResourceNotFound):
        await training(base="summs")


async def test_settings_are_those_that_are_given_and_no_others() -> None:
    made = await training(algorithm=fulmen.GRPO(steps=3, loss={"kind": "gspo"}))

    [stage] = made.config.stages
    assert (stage.algorithm, stage.settings) == ("grpo", {"steps": 3, "loss": {"kind": "gspo"}})


async def test_several_algorithms_are_stages() -> None:
    made = await training(algorithm=[fulmen.SFT(steps=3), "grpo"])

    assert [(each.algorithm, each.settings) for each in made.config.stages] == [("sft", {"steps": 3}), ("grpo", {})]
    with pytest.raises(fulmen.ConfigError) as raised:
        await training(algorithm=[])
    assert raised.value.problems == ("algorithm: at least one is required",)


async def test_data_is_checked_as_files_are_and_named_by_its_argument() -> None:
    with pytest.raises(fulmen.ConfigError) as raised:
        await training({"demonstrations": [{"messages": []}]}, tasks=[{}], validation=[])

    assert raised.value.problems == (
        "tasks:1: the object is empty",
        "validation: empty",
        'demonstrations:1: a demonstration needs "messages", a list that is not empty',
    )


async def test_every_problem_of_the_arguments_is_told(folder: Path) -> None:
    with pytest.raises(fulmen.ConfigError) as raised:
        await training(
            {"name": "Not a name", "policy": "Nor This"}, agent=f"{folder}/missing.py:solve", base="hf:org/model/x"
        )

    assert len(raised.value.problems) == 4
    assert all(
        word in str(raised.value)
        for word in ("missing.py", "base: must be hf:organisation/name", "name: at most", "policy: 1 to 63")
    )


async def test_requirements_travel_with_a_function_and_with_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "needs.txt").write_text("httpx==0.28.1\n")
    monkeypatch.chdir(folder)
    for agent in (solve, "agent.py:solve"):
        made = await training({"requirements": "needs.txt"}, agent=agent)
        assert made.config.agent.requirements == "needs.txt"
        assert "needs.txt" in made.bundle.files
    with pytest.raises(fulmen.ConfigError, match=r"missing\.txt cannot be read"):
        await training({"requirements": "missing.txt"}, agent="agent.py:solve")


async def test_an_agents_configuration_names_an_environment_relative_to_its_folder(folder: Path) -> None:
    given = fulmen.AgentConfig(python="agent.py:solve", venv=".venv")
    with pytest.raises(fulmen.ConfigError) as refused:
        await training({"folder": folder, "venv": ".venv"}, agent=given)
    assert [each.partition(";")[0] for each in refused.value.problems] == [
        "venv: set it in the AgentConfig instead",
        f"agent.venv: there is no folder {folder}/.venv",
    ]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True)
    made = await training({"folder": folder}, agent=given)
    assert made.config.agent.venv == str(folder / ".venv")
    made = await training({"folder": folder, "venv": Path(".venv")}, agent="agent.py:solve")
    assert made.config.agent.venv == str(folder / ".venv")
