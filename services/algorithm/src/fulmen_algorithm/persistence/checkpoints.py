"""Checkpoints: directories that are complete and match their manifest.

Files are written into a directory of another name, flushed to disk, and renamed; the manifest holds the SHA-256 of
every file. A checkpoint is never overwritten: each save takes the next sequence number, and a run that was rolled back
may save the same step again. Invariant: a kill at any moment leaves the newest complete checkpoint intact.

Names hold the epoch of the lease under which they were written. A store of one epoch sees its own checkpoints and those
that were complete when the epoch began: what an earlier owner of the run writes later is never taken for progress.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulmen_algorithm.training.files import MODEL, file_sha256, sync

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{8})(?:-(\d{8}))?")
_TEMPORARY = re.compile(r"\.writing-(\d{8})-(\d{8})")


class CheckpointDamaged(Exception):
    """A checkpoint directory is incomplete, or a file does not match the manifest."""


def checkpoint_name(sequence: int, epoch: int) -> str:
    """Returns the name of a checkpoint's directory."""
    return f"checkpoint-{sequence:08d}" + (f"-{epoch:08d}" if epoch else "")


def epoch_of(name: str) -> int | None:
    """Returns the epoch in the name of a checkpoint's directory; None for another name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[2] or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: Its directory; `path / "model"` is an ordinary model directory that an engine can load.
        sequence: Position in the order of saves.
        progress: The caller's state: cursor, consumed ids, versions and so on.
        size_bytes: Size of all files.
    """

    path: Path
    sequence: int
    progress: Mapping[str, Any]
    size_bytes: int

    @property
    def model_dir(self) -> Path:
        """Model directory inside the checkpoint."""
        return self.path / MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged directory skipped in the search for the newest checkpoint."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of the search for the newest valid checkpoint.

    Attributes:
        checkpoint: The newest valid one; None if no valid one exists.
        damaged: Newer ones that are damaged, newest first; the caller reports them.
    """

    checkpoint: Checkpoint | None
    damaged: tuple[Damage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one training run; one process writes at a time.

    Attributes:
        directory: Directory of the checkpoints, created on the first save.
        keep: Number of newest checkpoints to keep, >= 1.
        epoch: Epoch of the lease under which checkpoints are written.
        adopted: Names of the checkpoints of earlier epochs that belong to the run.
    """

    directory: Path
    keep: int = 3
    epoch: int = 0
    adopted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Raises ValueError if nothing would be kept."""
        if self.keep < 1:
            raise ValueError("At least one checkpoint must be kept.")

    def begin(self) -> Path:
        """Creates the folder for the next checkpoint; `complete` turns it into one.

        Raises:
            OSError: if it cannot be created.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.discard_partial()
        folder = self.directory / f".writing-{max(self._names(), default=0) + 1:08d}-{self.epoch:08d}"
        folder.mkdir()
        return folder

    def discard_partial(self) -> None:
        """Removes checkpoints of this epoch and earlier ones that were never completed."""
        for entry in self.directory.iterdir() if self.directory.is_dir() else ():
            match = _TEMPORARY.fullmatch(entry.name)
            if match and int(match[2]) <= self.epoch:
                shutil.rmtree(entry)

    def complete(self, folder: Path, progress: Mapping[str, Any], *, keep_also: Collection[int] = ()) -> Checkpoint:
        """Completes the checkpoint in the folder of `begin`, and removes those beyond `keep`.

        Args:
            folder: Holds the model and the training state; empty for an algorithm that trains no weights.
            progress: JSON-serialisable blob of the caller.
            keep_also: Sequences of older checkpoints to keep.

        Raises:
            TypeError: if `progress` is not JSON-serialisable; no checkpoint is then created.
            OSError: if the disk is full; earlier checkpoints are untouched.
        """
        blob = json.dumps(progress, sort_keys=True)
        (folder / PROGRESS).write_text(blob)
        size = _seal(folder)
        sequence = int(folder.name.split("-")[1])
        target = self.directory / checkpoint_name(sequence, self.epoch)
        folder.rename(target)
        sync(self.directory)
        names = self._names()
        for old in {*sorted(names)[: -self.keep]} - {*keep_also}:
            shutil.rmtree(self.directory / names[old])
        return Checkpoint(path=target, sequence=sequence, progress=json.loads(blob), size_bytes=size)

    def newest(self) -> Search:
        """Finds the newest checkpoint whose files all match its manifest."""
        damaged: list[Damage] = []
        for _, name in sorted(self._names().items(), reverse=True):
            path = self.directory / name
            try:
                return Search(checkpoint=read_checkpoint(path), damaged=tuple(damaged))
            except CheckpointDamaged as error:
                damaged.append(Damage(path=path, reason=str(error)))
        return Search(checkpoint=None, damaged=tuple(damaged))

    def get(self, sequence: int) -> Checkpoint:
        """Reads one checkpoint.

        Raises:
            CheckpointDamaged: if it is missing, or a file does not match the manifest.
        """
        return read_checkpoint(self.directory / self._names().get(sequence, checkpoint_name(sequence, self.epoch)))

    def listed(self) -> list[Checkpoint]:
        """Lists the checkpoints, oldest first, without verifying large files.

        Those with a missing file or without readable progress are left out; `newest` reports them.
        """
        found = []
        for _, name in sorted(self._names().items()):
            path = self.directory / name
            try:
                found.append(_described(path, _manifest(path)))
            except (CheckpointDamaged, OSError, ValueError):
                continue
        return found

    def _names(self) -> dict[int, str]:
        """Returns the names of the run's checkpoints by sequence."""
        if not self.directory.is_dir():
            return {}
        return {
            int(match[1]): match[0]
            for entry in self.directory.iterdir()
            if (match := _NAME.fullmatch(entry.name)) and (int(match[2] or 0) == self.epoch or match[0] in self.adopted)
        }


def read_checkpoint(path: Path) -> Checkpoint:
    """Checks every file of a checkpoint against its manifest.

    Raises:
        CheckpointDamaged: if the manifest is missing or unreadable, or a file is missing, unexpected or changed.
    """
    expected = _manifest(path)
    for name, digest in expected.items():
        if file_sha256(path / name) != digest:
            raise CheckpointDamaged(f"{name} differs from its checksum.")
    return _described(path, expected)


def _manifest(path: Path) -> dict[str, str]:
    """Reads the checksum of each file.

    Raises:
        CheckpointDamaged: if it cannot be read, or the files differ from those listed.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        expected: dict[str, str] = dict(manifest["files"])
        if manifest["format"] != FORMAT:
            raise CheckpointDamaged(f"Format {manifest['format']} is not {FORMAT}.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"The manifest cannot be read: {error}") from error
    present = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()} - {MANIFEST}
    if present != set(expected):
        raise CheckpointDamaged(f"Files differ from the manifest: {sorted(present ^ set(expected))}.")
    return expected


def _described(path: Path, files: Iterable[str]) -> Checkpoint:
    return Checkpoint(
        path=path,
        sequence=int(path.name.split("-")[1]),
        progress=json.loads((path / PROGRESS).read_text()),
        size_bytes=sum((path / name).stat().st_size for name in files),
    )


def _seal(directory: Path) -> int:
    """Flushes all files, then the manifest and the directories; returns the size in bytes."""
    files = sorted(f for f in directory.rglob("*") if f.is_file())
    for file in files:
        sync(file)
    digests = {str(f.relative_to(directory)): file_sha256(f) for f in files}
    (directory / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": digests}, indent=1, sort_keys=True))
    sync(directory / MANIFEST)
    for folder in (*(d for d in directory.rglob("*") if d.is_dir()), directory):
        sync(folder)
    return sum(f.stat().st_size for f in files)
