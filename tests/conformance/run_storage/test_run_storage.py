"""Runs in a shared folder and in an object store: another machine continues them, and an earlier owner harms nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen_algorithm.persistence.checkpoints import Checkpoint
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.entry import EventLog
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.training.files import is_storage_trouble
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.publishing import WrittenWeights
from tests.support.algorithm.new_run import now, training_run
from tests.support.object_store import S3, s3  # noqa: F401  (a fixture)

RUN = training_run()
Machine = Callable[[str], RunStorage]


@pytest.fixture(params=["folder", "s3"])
def machine(request: pytest.FixtureRequest, s3: S3, tmp_path: Path) -> Machine:  # noqa: F811
    """Returns what opens the storage on a machine of some name."""
    url = str(tmp_path / "shared") if request.param == "folder" else "s3://bucket/of/fulmen"
    return lambda name: RunStorage(tmp_path / name, url=url)


@pytest.fixture
def in_object_store(request: pytest.FixtureRequest, tmp_path: Path, s3: S3) -> Machine:  # noqa: F811
    return lambda name: RunStorage(tmp_path / name, url="s3://bucket/of/fulmen")


async def owned(storage: RunStorage, epoch: int) -> RunFiles:
    """Takes the run over on a machine."""
    storage.folder.mkdir(parents=True, exist_ok=True)
    files = await storage.newest_files(RUN)
    return await files.taken_over(epoch, owner=f"owner-{epoch}", record=RUN)


async def saved(files: RunFiles, step: int, *, keep: int = 3) -> Checkpoint:
    """Writes a checkpoint as a run does."""
    store = files.checkpoint_store(keep=keep)
    folder = store.begin()
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(bytes([step]) * 100)
    files.append_consumed([{"step": step}])
    made = store.complete(folder, {"step": step})
    await files.push()
    return made


def steps(files: RunFiles) -> list[int]:
    return [int(each.progress["step"]) for each in files.checkpoint_store().listed()]


async def test_another_machine_continues_where_the_last_owner_ended(machine: Machine):
    first = await owned(machine("a"), 1)
    log = EventLog(first, now)
    log.notify("info", "begun")
    first.save_run(replace(RUN, state=RunState.RUNNING))
    first.save_note("best", {"version": 3})
    for step in (1, 2):
        await saved(first, step)

    second = await owned(machine("b"), 2)

    assert steps(second) == [1, 2]
    newest = second.checkpoint_store().newest().checkpoint
    assert newest is not None
    assert (newest.model_dir / "weights").read_bytes() == b"\2" * 100
    assert [notice.message for notice in EventLog(second, now).notices()] == ["begun"]
    run = second.load_run()
    assert run is not None
    assert run.state is RunState.RUNNING
    assert second.notes() == {"best": {"version": 3}}
    assert (second.journal / "consumed.jsonl").read_text().count("\n") == 2
    assert (await saved(second, 3)).sequence == 3


async def test_what_an_earlier_owner_writes_late_is_never_read(machine: Machine):
    first = await owned(machine("a"), 1)
    await saved(first, 1)
    second = await owned(machine("b"), 2)
    # The first comes back: it knows of no other owner.
    late = await saved(first, 99)
    first.save_run(replace(RUN, state=RunState.FAILED, failure_message="late"))
    EventLog(first, now).notify("error", "late")
    first.append_consumed([{"step": 99}])
    await first.push()
    mine = await saved(second, 2)
    assert late.sequence == mine.sequence
    assert late.path.name != mine.path.name
    assert steps(second) == [1, 2]
    third = await owned(machine("c"), 3)
    assert steps(third) == [1, 2]
    run = third.load_run()
    assert run is not None
    assert run.state is RUN.state
    assert (
        "late" not in (third.journal / "events.jsonl").read_text()
        if (third.journal / "events.jsonl").exists()
        else True
    )
    assert "99" not in (third.journal / "consumed.jsonl").read_text()


async def test_an_owner_that_dies_before_its_first_checkpoint_changes_nothing(machine: Machine):
    first = await owned(machine("a"), 1)
    await saved(first, 1)
    await owned(machine("b"), 2)
    await saved(first, 99)  # while the second was the owner
    third = await owned(machine("c"), 7)
    assert steps(third) == [1]


async def test_old_checkpoints_are_removed_also_those_of_other_machines(machine: Machine, s3: S3):  # noqa: F811
    first = await owned(machine("a"), 1)
    for step in range(1, 5):
        await saved(first, step, keep=2)
    second = await owned(machine("b"), 2)
    assert steps(second) == [3, 4]
    for step in (5, 6):
        await saved(second, step, keep=2)
    assert steps(await owned(machine("c"), 3)) == [5, 6]
    stored = {key.split("/checkpoints/")[1].split("/")[0] for key in s3.objects if "/checkpoints/" in key}
    assert len(stored) in (0, 2)  # none if the storage is a folder


async def test_models_are_found_from_another_machine_and_pruned_by_their_owner_alone(machine: Machine):
    first = await owned(machine("a"), 1)
    old = await first.save_model(written, 1)
    second = await owned(machine("b"), 2)
    new = await second.save_model(written, 2)
    elsewhere = second.path_of(first.place_of(old.path))
    assert (await second.fetched(elsewhere) / "model.safetensors").read_bytes() == b"weights"
    await first.prune_models([])  # late
    assert (await second.fetched(new.path) / "model.safetensors").exists()


async def written(folder: Path) -> WrittenWeights:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    return WrittenWeights(kind=WeightsKind.FULL, sha256=folder.parent.name * 8, size_bytes=7, full_bytes=7)


async def test_a_torn_upload_is_no_checkpoint_and_is_completed_by_the_next(in_object_store: Machine, s3: S3):  # noqa: F811
    first = await owned(in_object_store("a"), 1)
    await saved(first, 1)
    s3.breaks_at = "manifest.json"
    with pytest.raises(OSError, match="object store") as failed:
        await saved(first, 2)
    assert is_storage_trouble(failed.value)
    assert steps(await owned(in_object_store("b"), 2)) == [1]
    s3.breaks_at = ""
    await first.push()
    assert steps(first) == [1, 2]


async def test_an_object_store_that_is_away_says_so_and_loses_nothing(in_object_store: Machine, s3: S3):  # noqa: F811
    first = await owned(in_object_store("a"), 1)
    s3.is_broken = True
    with pytest.raises(OSError, match="object store") as failed:
        await saved(first, 1)
    assert is_storage_trouble(failed.value)
    s3.is_broken = False
    await saved(first, 2)
    assert steps(await owned(in_object_store("b"), 2)) == [1, 2]


def test_a_run_whose_creator_died_before_it_wrote_a_file_begins_from_its_record(tmp_path: Path):
    files = RunFiles(tmp_path / "runs/default/small")._take_over(1, "b", RUN)
    assert files.load_run() == RUN
