"""The state folder of the service, and in it the folder of each run.

A run has `run.json`, `events.jsonl`, `consumed.jsonl`, `versions.jsonl`, `notes.json` and folders of weights.

Invariant: `run.json` is always complete, and `consumed.jsonl` holds at least the newest checkpoint's records.
"""

import fcntl
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pydantic import TypeAdapter

from fulmen_algorithm.persistence.files import (
    append_json_lines,
    append_line,
    last_line,
    read_lines,
    replace_file,
    truncate,
)
from fulmen_algorithm.persistence.model_folders import ModelFolders
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink, SavedModel
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_algorithm.training.files import sync
from fulmen_algorithm.weights.publishing import WrittenWeights
from fulmen_service_kit.errors import StartupError

_RUN = TypeAdapter(TrainingRun)
_EVENT = TypeAdapter(Event)


class RunFiles:
    """Reads and writes the files of one run."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder if it does not exist."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

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

    def keep_reference(self, first_weights: Path) -> Path:
        """Copies the first weights to `reference`, once, because their source may be gone when the run resumes.

        Raises:
            RunFailed: if the run has trained beyond its first weights and the copy is lost.
        """
        path, aside = self.folder / "reference", self.folder / ".reference"
        if path.exists():
            return path
        if first_weights.is_relative_to(self.checkpoints):
            raise RunFailed("The reference policy of the run is lost: its folder no longer exists.")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(first_weights, aside)
        for file in aside.rglob("*"):
            sync(file)
        aside.rename(path)
        sync(self.folder)
        return path

    @property
    def _consumed(self) -> Path:
        return self.folder / "consumed.jsonl"

    @property
    def _versions(self) -> Path:
        return self.folder / "versions.jsonl"

    def save_run(self, run: TrainingRun) -> None:
        """Replaces `run.json`."""
        replace_file(self.folder / "run.json", _json(_RUN, run, indent=1))

    def load_run(self) -> TrainingRun | None:
        """Reads `run.json`; None if the run was never saved."""
        path = self.folder / "run.json"
        return _RUN.validate_json(path.read_bytes()) if path.exists() else None

    def read(self) -> list[Event]:
        """Reads `events.jsonl`."""
        return read_lines(self.folder / "events.jsonl", _EVENT.validate_json)

    def read_last(self) -> Event | None:
        """Reads the last line of `events.jsonl`."""
        line = last_line(self.folder / "events.jsonl")
        return None if line is None else _EVENT.validate_json(line)

    def read_between(self, after: int, upto: int) -> Iterator[Event]:
        """Reads the lines of `events.jsonl` after one sequence up to another; line numbers are sequences."""
        with (self.folder / "events.jsonl").open("rb") as file:
            for line in islice(file, after, upto):
                yield _EVENT.validate_json(line)

    def append(self, event: Event) -> None:
        """Appends to `events.jsonl`."""
        append_line(self.folder / "events.jsonl", _json(_EVENT, event))

    def append_consumed(self, records: Sequence[Mapping[str, object]]) -> int:
        """Appends to `consumed.jsonl`; returns its size in bytes."""
        return append_json_lines(self._consumed, list(records))

    def truncate_consumed(self, size_bytes: int) -> None:
        """Truncates `consumed.jsonl` to the size in a checkpoint."""
        truncate(self._consumed, size_bytes)

    def set_aside_consumed(self, size_bytes: int, branch: int) -> list[dict[str, object]]:
        """Moves the end of `consumed.jsonl` to `rolled_back-<branch>.jsonl`; a repeated call completes the move."""
        aside = self.folder / f"rolled_back-{branch:04d}.jsonl"
        if not aside.exists():
            read_lines(self._consumed, json.loads)  # removes a truncated last line
            content = self._consumed.read_bytes() if self._consumed.exists() else b""
            replace_file(aside, content[size_bytes:])
        truncate(self._consumed, size_bytes)
        return read_lines(aside, json.loads)

    def append_version(self, record: Mapping[str, object]) -> None:
        """Appends to `versions.jsonl`."""
        append_json_lines(self._versions, [record])

    def versions(self, *, repair: bool = True) -> list[dict[str, object]]:
        """Reads `versions.jsonl`: all versions published by the run; see `read_lines` for `repair`."""
        return read_lines(self._versions, json.loads, repair=repair)

    def save_note(self, name: str, note: Mapping[str, object]) -> None:
        """Stores a note for the report in `notes.json`."""
        notes = {**self.notes(), name: dict(note)}
        replace_file(self.folder / "notes.json", json.dumps(notes, indent=1).encode())

    def notes(self) -> dict[str, dict[str, object]]:
        """Reads `notes.json`."""
        path = self.folder / "notes.json"
        return json.loads(path.read_bytes()) if path.exists() else {}

    async def save_model(self, write: Callable[[Path], Awaitable[WrittenWeights]], step: int) -> SavedModel:
        """Stores weights in a folder of `models`; see `ModelFolders.save`."""
        return await ModelFolders(self.models).save(write, step)

    async def rebuild_model(self, chain: Sequence[ChainLink], step: int) -> Path:
        """Rebuilds a complete folder; see `ModelFolders.rebuild`."""
        return await ModelFolders(self.models).rebuild(chain, step)

    async def prune_models(self, keep: Sequence[Path]) -> None:
        """Removes all other model folders."""
        await ModelFolders(self.models).prune(keep)


class StateFolder:
    """The service's state folder, with one folder per run.

    As a context manager it holds a lock on the folder; the kernel releases it when the process dies.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Creates the folder and acquires its lock.

        Raises:
            StartupError: if the folder cannot be created, or another process holds the lock.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = (self._path / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(
                f"Another process works on {self._path}: stop it, or choose another state_dir."
            ) from None
        except OSError as error:
            raise StartupError(f"Cannot use the state folder {self._path}: {error.strerror}.") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def run_files(self, run_id: str) -> RunFiles:
        """Opens the folder of a run."""
        return RunFiles(self._path / "runs" / run_id)

    def runs(self) -> list[tuple[TrainingRun, RunFiles]]:
        """Returns the stored runs; a folder whose run was never saved is skipped."""
        folder = self._path / "runs"
        found = []
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            files = RunFiles(path)
            run = files.load_run()
            if run is not None:
                found.append((run, files))
        return found


def _json(kind: TypeAdapter[Any], value: object, *, indent: int | None = None) -> bytes:
    """Encodes a value as JSON with non-finite numbers, for which pydantic would write null."""
    return json.dumps(kind.dump_python(value, mode="json", exclude_none=True), indent=indent).encode()
