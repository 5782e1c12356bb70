"""The files of a trainer: its record, the state from which it continues, and named checkpoints.

A state is a checkpoint as of `persistence.checkpoints`: complete or not there, whenever the service is killed. A named one
shares the files of the state that it was made of, by hard links.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic import TypeAdapter

from fulmen.errors import CheckpointNotFound, RunStorageUnavailable
from fulmen_algorithm.loops.record import Progress, TrainerRecord
from fulmen_algorithm.persistence.checkpoints import MANIFEST, PROGRESS, Checkpoint, CheckpointStore
from fulmen_algorithm.persistence.files import replace_file
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.files import is_storage_trouble

_RECORD: TypeAdapter[TrainerRecord] = TypeAdapter(TrainerRecord)
RECORD: Final = "trainer.json"
ANSWER: Final = "answer.bin"
_REMOVED: Final = ".removed-"
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCheckpoint:
    """A named checkpoint."""

    id: str
    step: int
    size_bytes: int
    created_s: float


class TrainerFiles:
    """The folder of one trainer. Blocks."""

    def __init__(self, folder: Path) -> None:
        """Creates nothing yet."""
        self.folder = folder

    def save(self, record: TrainerRecord) -> None:
        """Replaces the record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / RECORD, _RECORD.dump_json(record, indent=1))

    def load(self) -> TrainerRecord | None:
        """Reads the record; None if the trainer was never completely created."""
        path = self.folder / RECORD
        return _RECORD.validate_json(path.read_bytes()) if path.exists() else None

    @property
    def used_s(self) -> float:
        """Unix time of the last use."""
        return (self.folder / RECORD).stat().st_mtime

    def touch(self) -> None:
        """Notes a use."""
        os.utime(self.folder / RECORD)

    def begin(self) -> Path:
        """Creates the folder for the next state."""
        return self._state.begin()

    def complete(self, folder: Path, progress: Progress) -> None:
        """Makes the folder of `begin` the state from which the trainer continues."""
        (folder / ANSWER).write_bytes(progress.answer)
        self._state.complete(folder, progress.as_json())

    def saved(self) -> tuple[Path | None, Progress]:
        """Returns the folder of the newest state, None at the beginning, and its progress."""
        found = self._state.listed()[-1:]
        return (found[0].path, _progress(found[0])) if found else (None, Progress())

    def whole(self) -> tuple[Path | None, Progress]:
        """Returns the same after comparing all files with their checksums.

        Raises:
            RunFailed: if they differ.
        """
        search = self._state.newest()
        if search.checkpoint is None and search.damaged:
            raise RunFailed(f"Its saved state is damaged: {search.damaged[0].reason}")
        return self.saved()

    def keep(self, checkpoint: str) -> None:
        """Keeps the newest state under a name, in place of an earlier one."""
        state, progress = self.saved()
        if state is None:
            raise AssertionError("nothing is saved")
        _link(state, self._named(checkpoint), progress)

    def begin_with(self, named: Path) -> None:
        """Makes a named checkpoint of any trainer the first state of this one, which has no calls yet."""
        progress = _progress(_checkpoint(named))
        fresh = Progress(step=progress.step, weight_sum=progress.weight_sum)
        _link(named, self._state, fresh)

    def named(self) -> list[NamedCheckpoint]:
        """Lists the named checkpoints, newest first."""
        found = []
        for path in (self.folder / "checkpoints").glob("*"):
            for each in CheckpointStore(directory=path, keep=1).listed()[-1:]:
                created_s = each.path.stat().st_mtime
                step = int(each.progress["step"])
                found.append(NamedCheckpoint(id=path.name, step=step, size_bytes=each.size_bytes, created_s=created_s))
        return sorted(found, key=lambda each: -each.created_s)

    def size_bytes(self) -> int:
        """Returns the size of the state and the named checkpoints; files that they share count for each."""
        state = sum(each.size_bytes for each in self._state.listed())
        return state + sum(each.size_bytes for each in self.named())

    def checkpoint(self, name: str) -> Path:
        """Returns the folder of a named checkpoint, whose files are compared with their checksums.

        Raises:
            CheckpointNotFound: if there is none, or it is damaged.
        """
        found = self._named(name).newest().checkpoint
        if found is None:
            raise CheckpointNotFound("The checkpoint does not exist.", checkpoint=name)
        return found.path

    def delete(self) -> None:
        """Removes everything."""
        aside = self.folder.with_name(f"{_REMOVED}{self.folder.name}")
        if self.folder.exists():
            # Under another name first: one that is removed in part must not pass for whole.
            self.folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    @property
    def _state(self) -> CheckpointStore:
        return CheckpointStore(directory=self.folder / "state", keep=1)

    def _named(self, checkpoint: str) -> CheckpointStore:
        return CheckpointStore(directory=self.folder / "checkpoints" / checkpoint, keep=1)


def stored(folder: Path) -> Iterator[tuple[TrainerRecord, TrainerFiles]]:
    """Yields the trainers below a folder; removes what is left of ones that were not completely created or deleted.

    One that cannot be read, which another release may have written, is left alone.
    """
    for path in sorted(folder.glob("*/*/")):
        files = TrainerFiles(path)
        try:
            record = None if path.name.startswith(_REMOVED) else files.load()
            if record is None:
                shutil.rmtree(path, ignore_errors=True)
            else:
                files.saved()
                yield record, files
        except (OSError, ValueError, LookupError, TypeError) as error:
            _log.error("trainer_unreadable", trainer=path.name, error=type(error).__name__)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Translates errors of the storage into errors of the service."""
    try:
        yield
    except OSError as error:
        if not is_storage_trouble(error):
            raise
        raise RunStorageUnavailable("The storage of trainers is full or cannot be reached.") from error


def _checkpoint(path: Path) -> Checkpoint:
    return next(each for each in CheckpointStore(directory=path.parent, keep=1).listed() if each.path == path)


def _progress(checkpoint: Checkpoint) -> Progress:
    progress: dict[str, Any] = dict(checkpoint.progress)
    return Progress.read(progress, (checkpoint.path / ANSWER).read_bytes())


def _link(source: Path, store: CheckpointStore, progress: Progress) -> None:
    """Completes a checkpoint of another one's files."""
    folder = store.begin()
    ignored = shutil.ignore_patterns(MANIFEST, PROGRESS, ANSWER)
    shutil.copytree(source, folder, copy_function=_link_or_copy, dirs_exist_ok=True, ignore=ignored)
    (folder / ANSWER).write_bytes(progress.answer)
    store.complete(folder, progress.as_json())


def _link_or_copy(source: str, target: str) -> None:
    # Weights never change.
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
