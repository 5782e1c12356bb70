"""A start reads one checkpoint once, listing them reads none, and a branch keeps what it may have to go back to."""

import hashlib
from collections import Counter
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

import pytest

from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.collapse import NoCollapse
from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.events import EventLog
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.recorder import Recorder, RecorderSettings
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.runs.starting_point import starting_point
from fulmen_algorithm.training.checkpoints import CheckpointStore
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import WAIT_S, Service, checkpoints, created, now, rollback, working

KEEP = 2


@pytest.fixture
def read_whole(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """Counts how often each file was read to tell its checksum, from the moment that it is part of a checkpoint."""
    counted: Counter[Path] = Counter()
    digest = hashlib.file_digest

    def counting(file: BufferedReader, name: str) -> object:
        path = Path(file.name)
        counted.update([path] if any(part.startswith("checkpoint-") for part in path.parts) else [])
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    return counted


async def test_a_start_reads_the_checkpoint_that_it_goes_on_from_once_and_no_other(
    world: World, sft_draft: RunDraft, open_service: Callable[[World], Service], read_whole: Counter[Path]
) -> None:
    run = await created(sft_draft, world)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        await service.runs.wait_final(run.name, timeout_s=WAIT_S)
        target, newest = checkpoints(service, run)
        assert not read_whole, "a new run has none, and who lists them reads none"
        rollback(service, run, target)
        done = await service.runs.wait_final(run.name, timeout_s=WAIT_S)
    assert done.state is RunState.SUCCEEDED, done.failure_message
    assert target.path != newest.path
    assert {path for path in read_whole if path.is_relative_to(target.path)} == set(read_whole)
    assert set(read_whole.values()) == {1}
    assert any(path.name == "model.safetensors" for path in read_whole)


class Book:
    """A run that trains nothing, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.files = RunFiles(folder)
        self.store = CheckpointStore(directory=self.files.checkpoints, keep=KEEP)
        self.events = EventLog(self.files, now)

    async def begun(self, *branch_points: int) -> Recorder:
        """Starts it."""
        recorder = Recorder(
            storage=self.files,
            checkpoints=self.store,
            events=self.events,
            control=RunControl(),
            update_run=lambda changes: None,
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
        """Changes a checkpoint's file."""
        path = self.store.directory / f"checkpoint-{sequence:08d}/progress.json"
        path.write_bytes(path.read_bytes()[:-1] + b" }")


async def test_a_branch_whose_first_checkpoint_is_damaged_begins_again_where_it_began(tmp_path: Path) -> None:
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


async def test_a_run_that_was_put_back_to_a_damaged_checkpoint_fails_and_names_it(tmp_path: Path) -> None:
    book = Book(tmp_path)
    await book.stepped(await book.begun(), 1)
    book.damage(1)
    assert book.kept == [1, 2], "who lists them does not read them"
    with pytest.raises(RunFailed, match="Checkpoint 1 cannot be read"):
        await book.begun(1)


async def test_a_branch_of_which_nothing_is_whole_any_more_does_not_begin_the_run_anew(tmp_path: Path) -> None:
    book = Book(tmp_path)
    await book.stepped(await book.begun(), 1)
    await book.begun(1)
    for sequence in book.kept:
        book.damage(sequence)
    with pytest.raises(RunFailed, match="Checkpoint 1 cannot be read"):
        await book.begun(1)


async def test_the_newest_checkpoint_that_is_whole_is_gone_on_from(tmp_path: Path) -> None:
    book = Book(tmp_path)
    await book.stepped(await book.begun(), 1)
    book.damage(2)
    recorder = await book.begun()
    assert recorder.progress.step == 0
    assert [n.message for n in book.events.notices() if n.severity == "warning"] == [
        "Checkpoint checkpoint-00000002 is damaged and was skipped."
    ]
