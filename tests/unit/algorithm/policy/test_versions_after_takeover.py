"""A version names the folder that its first owner wrote; that folder is there for as long as the version is kept."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.model_roots import ANY_FOLDER
from fulmen_algorithm.policy.stored_weights import stored_policy
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.ports import Content
from fulmen_algorithm.runs.run import TrainingRun
from tests.support.algorithm.model_services import Crashes, ModelResources, World
from tests.support.algorithm.run_service import POLICY, created, descriptions, live, service_at, with_settings
from tests.support.object_store import S3, s3  # noqa: F401  (a fixture)

LAST = -1
"""Number of published versions at which the last life ends: it lives to the end of the run."""


@pytest.fixture
async def run(world: World, grpo_draft: RunDraft) -> TrainingRun:
    """Returns a run that publishes three versions between its two checkpoints, and keeps two."""
    return await created(with_settings(grpo_draft, steps=2, checkpoint_every=2), world)


@pytest.fixture
def live_until(
    world: World, run: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., object]:
    """Returns what lets a machine own the run until it publishes its next version after so many."""
    publish, doomed = ModelResources.publish, LAST
    world.reward_of = lambda name: float(name.endswith(".0"))

    async def dying(resources: ModelResources, **given: str) -> Content:
        if len(world.resources.get(POLICY, ())) == doomed:
            world.crashes.at_call = world.crashes.calls + 1
        return await publish(resources, **given)

    async def live_once(machine: str, published: int, *, storage: str, after_effect: bool = False) -> None:
        nonlocal doomed
        doomed = published
        world.new_life(Crashes(after_effect=after_effect))
        service = service_at(tmp_path / machine, world, storage=storage)
        if not world.leases.rows:
            await service.ownership.create(run)
            service.runs.add(run)
        await service.ownership.learn()
        service.runs.wake()
        await live(service, run, world.crashes)
        world.leases.lapse(run.name)

    monkeypatch.setattr(ModelResources, "publish", dying)
    return live_once


async def check_versions(world: World, run: TrainingRun, tmp_path: Path, storage: str) -> None:
    """Loads the versions that are kept, on another machine."""
    assert len(descriptions(world)) == 3
    files, resources = RunStorage(tmp_path / "elsewhere", url=storage).run_files(run), ModelResources(world)
    for version in (2, 3):
        content = await resources.get(f"{POLICY}/versions/{version}")
        stored = await stored_policy(content, resources=resources, files=files, roots=ANY_FOLDER)
        assert (await stored.model_folder() / "model.safetensors").exists()


async def test_a_version_that_two_owners_publish_is_kept_where_it_is_said_to_be(
    tmp_path,
    world,
    run,
    live_until,
    s3: S3,  # noqa: F811
):
    storage = "s3://bucket/of/fulmen"
    await live_until("a", 1, storage=storage, after_effect=True)
    await live_until("b", 2, storage=storage)
    await live_until("a", LAST, storage=storage)
    await check_versions(world, run, tmp_path, storage)


async def test_a_published_folder_that_was_pruned_is_there_again_once_it_is_published_again(
    tmp_path, world, run, live_until
):
    storage = str(tmp_path / "shared")
    await live_until("a", 1, storage=storage, after_effect=True)
    for folder in (tmp_path / "shared").rglob("models/*/000001-*"):
        shutil.rmtree(folder)
    await live_until("b", LAST, storage=storage)
    await check_versions(world, run, tmp_path, storage)
