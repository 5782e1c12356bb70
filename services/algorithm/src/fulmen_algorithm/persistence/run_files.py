"""The files of one run.

A run has a folder with checkpoints, models and journals. The journal of an epoch is what the owner of that epoch of the
run's lease writes: `run.json`, `events.jsonl`, `consumed.jsonl`, `versions.jsonl`, `notes.json`. A new owner copies the
newest journal to one of its own, so an earlier owner that returns writes to a place that is no longer read.

Invariant: `run.json` is always complete, and `consumed.jsonl` holds at least the newest checkpoint's records.
"""

import asyncio
import errno
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fulmen_algorithm.persistence.checkpoints import CheckpointStore
from fulmen_algorithm.persistence.files import (
    append_json_lines,
    append_line,
    last_line,
    read_lines,
    replace_file,
    truncate,
)
from fulmen_algorithm.persistence.model_folders import ModelFolders, copy_model
from fulmen_algorithm.persistence.object_mirror import ObjectMirror
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink, SavedModel
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_algorithm.training.files import appear
from fulmen_algorithm.weights.publishing import WrittenWeights

_RUN = TypeAdapter(TrainingRun)
_EVENT = TypeAdapter(Event)
_JOURNAL = re.compile(r"journal-(\d{8})")
ADOPTED = "adopted.json"
OWNER = "owner"
RUNS_PLACE = "runs:/"
"""Begins the name of a folder in the object store of the runs, wherever each machine keeps its copy."""
PROBE_BYTES = 64 * 1024
FREE_SPACE_FACTOR = 1.05


class RunFiles:
    """Reads and writes the files of one run, under one epoch of its lease."""

    def __init__(self, folder: Path, *, epoch: int | None = None, mirror: ObjectMirror | None = None) -> None:
        """Creates the folder if it does not exist.

        Args:
            folder: Folder of the run.
            epoch: Epoch of the journal; None for the newest one there.
            mirror: Object storage that holds the run, of which the folder is a copy; None if the folder is the storage.
        """
        self.folder = folder
        self.epoch = newest_epoch(folder) if epoch is None else epoch
        self.mirror = mirror
        self.journal.mkdir(parents=True, exist_ok=True)
        self._adopted: frozenset[str] | None = None
        self._changed = False

    @property
    def journal(self) -> Path:
        """Folder of what the owner of the epoch writes."""
        return self.folder / journal_name(self.epoch)

    @property
    def project(self) -> str:
        """`projects/{project}` of the run."""
        return f"projects/{self.folder.parent.name}"

    @property
    def _runs(self) -> Path:
        """Folder of all runs, which has a folder per project."""
        return self.folder.parent.parent

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def models(self) -> Path:
        """Folder of the published models."""
        return self.folder / "models"

    @property
    def initial(self) -> Path:
        """Folder of the model built by the run's script."""
        return self.folder / "initial"

    @property
    def owner(self) -> str:
        """Id of the service that owned the epoch; empty if unknown."""
        path = self.journal / OWNER
        return path.read_text() if path.exists() else ""

    def checkpoint_store(self, *, keep: int = 3) -> CheckpointStore:
        """Returns the run's checkpoints as of this epoch."""
        if self._adopted is None:
            path = self.journal / ADOPTED
            self._adopted = frozenset(json.loads(path.read_bytes())) if path.exists() else frozenset()
        return CheckpointStore(directory=self.checkpoints, keep=keep, epoch=self.epoch, adopted=self._adopted)

    async def taken_over(self, epoch: int, *, owner: str, record: TrainingRun) -> "RunFiles":
        """Returns the files of a new epoch, which continue the newest ones.

        Args:
            epoch: The new epoch.
            owner: Id of its owner.
            record: The run, for a run whose creator died before it wrote a file.

        Raises:
            OSError: if the storage is full or cannot be reached.
        """
        if self.mirror is not None:
            await self.mirror.pull(self.folder, below=epoch)
        files = await asyncio.to_thread(self._take_over, epoch, owner, record)
        await files.push()
        return files

    def _take_over(self, epoch: int, owner: str, record: TrainingRun) -> "RunFiles":
        before = RunFiles(self.folder, epoch=newest_epoch(self.folder, below=epoch), mirror=self.mirror)
        # Checkpoints first: each of them is covered by the journal as it is afterwards.
        adopted = sorted(each.path.name for each in before.checkpoint_store().listed())
        aside = self.folder / f".{journal_name(epoch)}"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(before.journal, aside)
        if not (aside / "run.json").exists():
            (aside / "run.json").write_bytes(encoded_run(record))
        (aside / ADOPTED).write_text(json.dumps(adopted))
        (aside / OWNER).write_text(owner)
        target = self.folder / journal_name(epoch)
        shutil.rmtree(target, ignore_errors=True)
        appear(aside, target)
        self._remove_journals(below=before.epoch)
        return RunFiles(self.folder, epoch=epoch, mirror=self.mirror)

    def _remove_journals(self, *, below: int) -> None:
        # That of the last owner stays: it may still write there.
        for path in self.folder.iterdir():
            match = _JOURNAL.fullmatch(path.name)
            if match and int(match[1]) < below:
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, owner: str) -> None:
        """Writes the owner of a journal that continues no other."""
        (self.journal / OWNER).write_text(owner)

    async def push(self) -> None:
        """Uploads what has changed to object storage; does nothing if the folder is the storage.

        Raises:
            OSError: if it cannot be reached.
        """
        if self.mirror is not None:
            self._changed = False
            try:
                await self.mirror.push(self.folder, self.checkpoint_store(), epoch=self.epoch)
            except OSError:
                self._changed = True
                raise

    async def push_journal(self) -> None:
        """Uploads the journal if it has changed since; see `push`."""
        if self.mirror is not None and self._changed:
            self._changed = False
            try:
                await self.mirror.push_journal(self.folder, epoch=self.epoch)
            except OSError:
                self._changed = True
                raise

    async def fetched(self, path: Path) -> Path:
        """Returns a folder of this run or another, downloaded if only object storage has it; see `push` for errors."""
        runs = self._runs
        if self.mirror is not None and not path.exists() and path.is_relative_to(runs):
            await self.mirror.fetch(runs.joinpath(*path.relative_to(runs).parts[:2]), path)
        return path

    def place_of(self, path: Path) -> str:
        """Returns how a folder is named where other machines read it: by its place below the runs, if it is there."""
        if self.mirror is not None and path.is_relative_to(self._runs):
            return f"{RUNS_PLACE}{path.relative_to(self._runs)}"
        return str(path)

    def path_of(self, place: str) -> Path:
        """Returns the folder on this machine of a place."""
        if place.startswith(RUNS_PLACE):
            return self._runs / place.removeprefix(RUNS_PLACE)
        return Path(place)

    async def push_folder(self, path: Path) -> None:
        """Uploads a folder of weights that never changes; see `push`."""
        if self.mirror is not None:
            await self.mirror.push_folder(self.folder, path)

    def check_room(self) -> None:
        """Checks that a checkpoint as large as the last one can be written.

        Raises:
            OSError: if it cannot.
        """
        newest = self.checkpoint_store().listed()[-1:]
        needed = int(newest[0].size_bytes * FREE_SPACE_FACTOR) if newest else 0
        state = os.statvfs(self.folder)
        if state.f_bavail * state.f_frsize < needed + PROBE_BYTES:
            raise OSError(errno.ENOSPC, "there is less free space than a checkpoint needs", str(self.folder))
        probe = self.journal / ".probe"
        try:
            replace_file(probe, bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
            (self.journal / "..probe.new").unlink(missing_ok=True)

    def keep_reference(self, first_weights: Path) -> Path:
        """Copies the first weights to `reference`, once, because their source may no longer exist when the run
        resumes.

        Raises:
            RunFailed: if the run has trained beyond its first weights and the copy is lost.
        """
        path, aside = self.folder / "reference", self.folder / f".reference-{self.epoch:08d}"
        if path.exists():
            return path
        if first_weights.is_relative_to(self.checkpoints):
            raise RunFailed("The reference policy of the run is lost: its folder no longer exists.")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(first_weights, aside)
        appear(aside, path)
        return path

    @property
    def _consumed(self) -> Path:
        return self.journal / "consumed.jsonl"

    @property
    def _versions(self) -> Path:
        return self.journal / "versions.jsonl"

    def save_run(self, run: TrainingRun) -> None:
        """Replaces `run.json`."""
        self._changed = True
        replace_file(self.journal / "run.json", encoded_run(run))

    def load_run(self) -> TrainingRun | None:
        """Reads `run.json`; None if the run was never saved."""
        path = self.journal / "run.json"
        return decoded_run(path.read_bytes()) if path.exists() else None

    def read(self) -> list[Event]:
        """Reads `events.jsonl`."""
        return read_lines(self.journal / "events.jsonl", _EVENT.validate_json)

    def read_last(self) -> Event | None:
        """Reads the last line of `events.jsonl`."""
        line = last_line(self.journal / "events.jsonl")
        return None if line is None else _EVENT.validate_json(line)

    def read_between(self, after: int, upto: int) -> Iterator[Event]:
        """Reads the lines of `events.jsonl` after one sequence up to another; line numbers are sequences."""
        with (self.journal / "events.jsonl").open("rb") as file:
            for line in islice(file, after, upto):
                yield _EVENT.validate_json(line)

    def append(self, event: Event) -> None:
        """Appends to `events.jsonl`."""
        self._changed = True
        append_line(self.journal / "events.jsonl", _json(_EVENT, event))

    def append_consumed(self, records: Sequence[Mapping[str, object]]) -> int:
        """Appends to `consumed.jsonl`; returns its size in bytes."""
        return append_json_lines(self._consumed, list(records))

    def truncate_consumed(self, size_bytes: int) -> None:
        """Truncates `consumed.jsonl` to the size in a checkpoint."""
        truncate(self._consumed, size_bytes)

    def set_aside_consumed(self, size_bytes: int, branch: int) -> list[dict[str, object]]:
        """Moves the end of `consumed.jsonl` to `rolled_back-<branch>.jsonl`; a repeated call completes the move."""
        aside = self.journal / f"rolled_back-{branch:04d}.jsonl"
        if not aside.exists():
            read_lines(self._consumed, json.loads)  # removes a truncated last line
            content = self._consumed.read_bytes() if self._consumed.exists() else b""
            replace_file(aside, content[size_bytes:])
        truncate(self._consumed, size_bytes)
        return read_lines(aside, json.loads)

    def append_version(self, record: Mapping[str, object]) -> None:
        """Appends to `versions.jsonl`."""
        self._changed = True
        append_json_lines(self._versions, [record])

    def versions(self, *, repair: bool = True) -> list[dict[str, object]]:
        """Reads `versions.jsonl`: all versions published by the run; see `read_lines` for `repair`."""
        return read_lines(self._versions, json.loads, repair=repair)

    def save_note(self, name: str, note: Mapping[str, object]) -> None:
        """Stores a note for the report in `notes.json`."""
        notes = {**self.notes(), name: dict(note)}
        replace_file(self.journal / "notes.json", json.dumps(notes, indent=1).encode())

    def notes(self) -> dict[str, dict[str, object]]:
        """Reads `notes.json`."""
        path = self.journal / "notes.json"
        return json.loads(path.read_bytes()) if path.exists() else {}

    async def save_model(self, write: Callable[[Path], Awaitable[WrittenWeights]], step: int) -> SavedModel:
        """Stores weights in a folder of `models`; see `ModelFolders.save`."""
        saved = await self._model_folders.save(write, step)
        await self.push_folder(saved.path)
        return saved

    async def model_placed(self, path: Path, place: str) -> Path:
        """Returns the folder of a place, with a copy of the weights in `path` if it has none; `path` if it is elsewhere."""
        target = self.path_of(place)
        if not target.is_relative_to(self.models):
            return path  # named by a machine that mounts the storage elsewhere
        if path != target and not (await self.fetched(target)).exists():
            await asyncio.to_thread(copy_model, path, target)
            await self.push_folder(target)
        return target

    async def rebuild_model(self, chain: Sequence[ChainLink], step: int) -> Path:
        """Rebuilds a complete folder; see `ModelFolders.rebuild`."""
        for link in chain:
            await self.fetched(link.path)
        return await self._model_folders.rebuild(chain, step)

    async def prune_models(self, keep: Sequence[Path]) -> None:
        """Removes all other model folders of this epoch and earlier ones."""
        removed = await self._model_folders.prune(keep)
        if self.mirror is not None:
            await self.mirror.remove_folders(self.folder, removed)

    @property
    def _model_folders(self) -> ModelFolders:
        return ModelFolders(self.models, epoch=self.epoch)


def journal_name(epoch: int) -> str:
    """Returns the name of an epoch's journal."""
    return f"journal-{epoch:08d}"


def newest_epoch(folder: Path, *, below: int | None = None) -> int:
    """Returns the newest epoch, optionally below another, that has a journal; 0 without one."""
    epochs = (
        int(match[1])
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _JOURNAL.fullmatch(path.name))
    )
    return max((epoch for epoch in epochs if below is None or epoch < below), default=0)


def encoded_run(run: TrainingRun) -> bytes:
    """Encodes a run as in `run.json`."""
    return _json(_RUN, run, indent=1)


def decoded_run(content: bytes) -> TrainingRun:
    """Decodes a run from `run.json`.

    Raises:
        ValueError: if it is none.
    """
    return _RUN.validate_json(content)


def _json(kind: TypeAdapter[Any], value: object, *, indent: int | None = None) -> bytes:
    """Encodes a value as JSON with non-finite numbers, for which pydantic would write null."""
    return json.dumps(kind.dump_python(value, mode="json", exclude_none=True), indent=indent).encode()
