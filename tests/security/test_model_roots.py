"""Weights are loaded only from folders that the operator names, whatever a run or a policy version says."""

import json
from pathlib import Path

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.policy.stored_weights import stored_policy
from fulmen_algorithm.runs.creation.rules import CreationRules, RunDraft
from fulmen_algorithm.runs.creation.stages import checked_runs
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Content
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec
from tests.support.algorithm.model_services import ModelResources
from tests.support.algorithm.new_run import now
from tests.support.algorithm.run_service import ALGORITHMS, made_world

SETTING = "FULMEN_ALGORITHM_MODEL_ROOTS"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Makes a folder that the operator names, one that it does not, and ways from one to the other."""
    allowed, secret = tmp_path / "models", tmp_path / "secret"
    for folder in (allowed / "tiny", secret / "tiny", tmp_path / "models-of-others"):
        folder.mkdir(parents=True)
    (allowed / "link").symlink_to(secret / "tiny")
    (allowed / "turn").symlink_to("../secret")
    theirs = tmp_path / "runs" / "other" / "small" / "models"
    theirs.mkdir(parents=True)
    return {
        "run of another project": theirs,
        "allowed": allowed / "tiny",
        "other": secret / "tiny",
        "link": allowed / "link",
        "link in the middle": allowed / "turn" / "tiny",
        "dots": allowed / "tiny" / ".." / ".." / "secret" / "tiny",
        "same beginning": tmp_path / "models-of-others",
        "missing": secret / "missing",
        "root": Path("/"),
    }


def roots(folders: dict[str, Path], tmp_path: Path) -> ModelRoots:
    return ModelRoots.of(str(folders["allowed"].parent), runs=tmp_path / "runs")


async def created(path: Path, allowed: ModelRoots) -> None:
    world = made_world()
    draft = RunDraft(
        name="",
        project="projects/default",
        display_name="",
        algorithm="sft",
        settings_json="{}",
        policy=PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source=str(path)),
        inputs={"demonstrations": "resources/dataset.demonstrations/versions/1"},
    )
    rules = CreationRules(registry=ALGORITHMS, model_roots=allowed)
    await checked_runs([draft], rules=rules, resources=ModelResources(world), now=now())


REFUSED = ("other", "link", "link in the middle", "dots", "same beginning", "missing", "root", "run of another project")


@pytest.mark.parametrize("where", REFUSED)
async def test_a_run_that_begins_outside_of_the_roots_is_refused_with_the_setting(where, folders, tmp_path):
    with pytest.raises(SettingsInvalid) as refused:
        await created(folders[where], roots(folders, tmp_path))
    (problem,) = refused.value.violations
    assert problem.field == "policy.path"
    assert SETTING in problem.description


@pytest.mark.parametrize("path", ["\0", "~nobody-of-this-name/x"])
async def test_what_is_no_path_is_refused(path, tmp_path):
    with pytest.raises(SettingsInvalid, match="not valid") as refused:
        await created(path, ModelRoots.of("/"))
    assert "is not a path of this machine" in refused.value.violations[0].description


async def test_a_run_may_begin_below_the_roots(folders, tmp_path):
    await created(folders["allowed"], roots(folders, tmp_path))
    await created(folders["other"], ModelRoots.of("/"))


async def test_a_root_above_the_runs_opens_no_run_of_another_project(folders, tmp_path):
    allowed = ModelRoots.of("/", runs=tmp_path / "runs")
    with pytest.raises(SettingsInvalid):
        await created(folders["run of another project"], allowed)
    await created(tmp_path / "runs" / "default" / "small", allowed)


@pytest.mark.parametrize("where", REFUSED)
@pytest.mark.parametrize("kind", ["full", "lora", "delta", "delta of another", "base model", "merged", "runs"])
async def test_a_version_that_points_outside_of_the_roots_is_not_loaded(kind, where, folders, tmp_path):
    inside, outside = str(folders["allowed"]), str(folders[where])
    lora = {"kind": "lora", "path": inside, "sha256": "x", "base_model": inside, "adapters": ["default"]}
    world = made_world()
    world.add_resource("resources/policy.base", json.dumps({"kind": "full", "path": outside, "sha256": "x"}).encode())
    base = "resources/policy.base/versions/1"
    description: dict[str, object] = {
        "full": {"kind": "full", "path": outside, "sha256": "x"},
        "lora": {**lora, "path": outside},
        "delta": {"kind": "delta", "path": outside, "sha256": "x", "base": base, "step": 1},
        "delta of another": {"kind": "delta", "path": inside, "sha256": "x", "base": base, "step": 1},
        "base model": {**lora, "base_model": outside},
        "merged": {**lora, "merged": outside},
        "runs": {"kind": "full", "path": f"runs:/../..{outside}", "sha256": "x"},
    }[kind]
    content = Content(
        name="resources/policy.p/versions/1", version=1, data=json.dumps(description).encode(), kind="policy"
    )
    files = RunFiles(tmp_path / "runs" / "default" / "small")
    with pytest.raises(RunFailed, match=SETTING):
        await stored_policy(content, resources=ModelResources(world), files=files, roots=roots(folders, tmp_path))


async def test_versions_of_the_runs_themselves_are_always_loaded(folders, tmp_path):
    files = RunFiles(tmp_path / "runs" / "default" / "small")
    model = files.models / "000001"
    model.mkdir(parents=True)
    description = {"kind": "full", "path": str(model), "sha256": "x"}
    content = Content(
        name="resources/policy.p/versions/1", version=1, data=json.dumps(description).encode(), kind="policy"
    )
    found = await stored_policy(
        content, resources=ModelResources(made_world()), files=files, roots=roots(folders, tmp_path)
    )
    assert found.path == model
