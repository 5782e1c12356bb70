"""A start reads one checkpoint once, listing reads none, and a branch keeps the checkpoints it may return to."""

import hashlib
from collections import Counter
from io import BufferedReader
from pathlib import Path

import pytest

from fulmen_algorithm.persistence.checkpoints import CheckpointStore
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.collapse import NoCollapse
from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.creation.starting_point import starting_point
from fulmen_algorithm.runs.entry import Entry, EventLog
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.recorder import Recorder, RecorderSettings
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.new_run import now, training_run
from tests.support.algorithm.run_service import checkpoints, created, rollback

KEEP = 2


@pytest.fixture
def read_whole(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """Counts how often each file of a finished checkpoint was read for its checksum."""
    counted: Counter[Path] = Counter()
    digest = hashlib.file_digest

    def counting(file: BufferedReader, name: str) -> object:
        path = Path(file.name)
        counted.update([path] if any(part.startswith("checkpoint-") for part in path.parts) else [])
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    return counted


async def test_a_start_reads_its_own_checkpoint_once_and_no_other(world, sft_draft, service, read_whole):
    run = await created(sft_draft, world)
    service.runs.add(run)
    await service.finish(run)
    target, newest = checkpoints(service, run)
    assert not read_whole, "a new run has none, and who lists them reads none"
    rollback(service, run, target)
    done = await service.finish(run)
    assert done.state is RunState.SUCCEEDED, done.failure_message
    assert target.path != newest.path
    assert {path for path in read_whole if path.is_relative_to(target.path)} == set(read_whole)
    assert set(read_whole.values()) == {1}
    assert any(path.name == "model.safetensors" for path in read_whole)


async def owned() -> None:
    """Returns: no other service takes runs over."""


class Book:
    """A run that trains nothing, in a folder."""

    def __init__(self, folder: Path) -> None:
        files = RunFiles(folder)
        self.store = CheckpointStore(directory=files.checkpoints, keep=KEEP)
        self.entry = Entry(run=training_run(), events=EventLog(files, now), files=files)

    async def begun(self, *branch_points: int) -> Recorder:
        recorder = Recorder(
            entry=self.entry,
            checkpoints=self.store,
            control=RunControl(),
            check_owned=owned,
            settings=RecorderSettings(steps=100, checkpoint_every=1, collapse=NoCollapse(), collapses=0),
        )
        await recorder.recover(None, starting_point(self.store, branch_points), branch_points=branch_points)
        return recorder

    @staticmethod
    async def stepped(recorder: Recorder, steps: int) -> None:
        """Takes steps, with a checkpoint after each."""
        for _ in range(steps):
            recorder.commit()
            await recorder.end_step({})

    @property
    def kept(self) -> list[int]:
        """Sequences of the checkpoints that are there."""
        return [each.sequence for each in self.store.listed()]

    def damage(self, sequence: int) -> None:
        path = self.store.directory / f"checkpoint-{sequence:08d}/progress.json"
        path.write_bytes(path.read_bytes()[:-1] + b" }")


async def test_a_branch_whose_first_checkpoint_is_damaged_starts_over_from_its_origin(tmp_path):
    book = Book(tmp_path)
    await book.stepped(await book.begun(), 4)
    assert book.kept == [4, 5]
    await book.begun(4)
    assert book.kept == [4, 5, 6], "the branch has one of its own"
    book.damage(6)
    recorder = await book.begun(4)
    assert (recorder.progress.step, recorder.progress.branch) == (3, 1)
    assert book.kept == [4, 6, 7], "one of those of the branch is damaged"
    await book.stepped(recorder, KEEP)
    assert book.kept == [8, 9], "the branch has enough of its own"
    assert starting_point(book.store, (4,)).checkpoint == book.store.get(9)


async def test_a_rollback_to_a_damaged_checkpoint_fails_the_run_and_names_it(tmp_path):
    book = Book(tmp_path)
    await book.stepped(await book.begun(), 1)
    book.damage(1)
    assert book.kept == [1, 2], "who lists them does not read them"
    with pytest.raises(RunFailed, match="Checkpoint 1 can no longer be read"):
        await book.begun(1)


async def test_a_branch_with_only_damaged_checkpoints_does_not_restart_the_run(tmp_path):
    book = Book(tmp_path)
    await book.stepped(await book.begun(), 1)
    await book.begun(1)
    for sequence in book.kept:
        book.damage(sequence)
    with pytest.raises(RunFailed, match="Checkpoint 1 can no longer be read"):
        await book.begun(1)


async def test_a_run_resumes_from_the_newest_intact_checkpoint(tmp_path):
    book = Book(tmp_path)
    await book.stepped(await book.begun(), 1)
    book.damage(2)
    recorder = await book.begun()
    assert recorder.progress.step == 0
    assert [n.message for n in book.entry.events.notices() if n.severity == "warning"] == [
        "Checkpoint checkpoint-00000002 is damaged and was skipped."
    ]
