"""Checkpoints: a directory is either complete and checked by its manifest, or it is not a checkpoint.

Everything is written into a directory of another name, flushed to disk, and renamed; the manifest holds the SHA-256 of
every file. A checkpoint is never overwritten: each save takes the next sequence number, so that a run that was rolled
back may save the same step again. Invariant: killed at any moment, the newest complete checkpoint is still there.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model

from fulmen_algorithm.training.step import TrainingState

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
TRAINING = "training.pt"
MODEL = "model"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{8})")
_TEMPORARY = ".writing-"


class CheckpointDamaged(Exception):
    """A checkpoint directory is incomplete, or a file in it is not what the manifest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: Its directory; `path / "model"` is an ordinary model directory that an engine can load.
        sequence: Position in the order of saves.
        progress: The caller's blob: cursor, consumed ids, versions, whatever it needs to go on.
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
    """A directory that was passed over when looking for the newest checkpoint."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of looking for the newest valid checkpoint.

    Attributes:
        checkpoint: The newest valid one, None if there is none.
        damaged: Newer ones that are damaged, newest first; the caller reports them.
    """

    checkpoint: Checkpoint | None
    damaged: tuple[Damage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one training run; one process writes at a time.

    Attributes:
        directory: Made on the first save.
        keep: Number of newest checkpoints that stay, >= 1.
    """

    directory: Path
    keep: int = 3

    def __post_init__(self) -> None:
        """Raises ValueError if nothing would be kept."""
        if self.keep < 1:
            raise ValueError("At least one checkpoint must be kept.")

    def save(self, state: TrainingState, progress: Mapping[str, Any]) -> tuple[Checkpoint, float]:
        """Writes a checkpoint and removes those beyond `keep`.

        Args:
            state: Policy, optimiser, schedule, counters; the process-wide random generators go with it.
            progress: JSON-serialisable blob of the caller.

        Returns:
            The checkpoint, and the seconds that it took.

        Raises:
            TypeError: if `progress` is not JSON-serialisable (nothing is written then).
            OSError: if the disk is full; the checkpoints before are untouched.
        """
        started = perf_counter()
        blob = json.dumps(progress, sort_keys=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        sequence = max(self._sequences(), default=0) + 1
        target = self.directory / f"checkpoint-{sequence:08d}"
        temporary = self.directory / f"{_TEMPORARY}{target.name}"
        temporary.mkdir()
        state.policy.save(temporary / MODEL)
        torch.save(_training_dict(state), temporary / TRAINING)
        (temporary / PROGRESS).write_text(blob)
        size = _seal(temporary)
        temporary.rename(target)
        _sync(self.directory)
        for old in sorted(self._sequences())[: -self.keep]:
            shutil.rmtree(self.directory / f"checkpoint-{old:08d}")
        checkpoint = Checkpoint(path=target, sequence=sequence, progress=json.loads(blob), size_bytes=size)
        return checkpoint, perf_counter() - started

    def newest(self) -> Search:
        """Finds the newest checkpoint whose files all match its manifest."""
        damaged: list[Damage] = []
        for sequence in sorted(self._sequences(), reverse=True):
            path = self.directory / f"checkpoint-{sequence:08d}"
            try:
                return Search(checkpoint=read_checkpoint(path), damaged=tuple(damaged))
            except CheckpointDamaged as error:
                damaged.append(Damage(path=path, reason=str(error)))
        return Search(checkpoint=None, damaged=tuple(damaged))

    def all_valid(self) -> list[Checkpoint]:
        """Lists the valid checkpoints, oldest first: what a run may be rolled back to."""
        found = []
        for sequence in sorted(self._sequences()):
            try:
                found.append(read_checkpoint(self.directory / f"checkpoint-{sequence:08d}"))
            except CheckpointDamaged:
                continue
        return found

    def _sequences(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return [int(match[1]) for entry in self.directory.iterdir() if (match := _NAME.fullmatch(entry.name))]

    def _remove_leftovers(self) -> None:
        for entry in self.directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(entry)


def read_checkpoint(path: Path) -> Checkpoint:
    """Checks every file of a checkpoint against its manifest.

    Raises:
        CheckpointDamaged: if the manifest is missing or unreadable, or a file is missing, strange or changed.
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
    for name, digest in expected.items():
        if _sha256(path / name) != digest:
            raise CheckpointDamaged(f"{name} differs from its checksum.")
    return Checkpoint(
        path=path,
        sequence=int(path.name.rpartition("-")[2]),
        progress=json.loads((path / PROGRESS).read_text()),
        size_bytes=sum((path / name).stat().st_size for name in expected),
    )


def restore(checkpoint: Checkpoint, state: TrainingState) -> None:
    """Puts a checkpoint into `state`, in place, and into the process-wide random generators.

    Training then goes on bit for bit as if it had not stopped.

    Raises:
        RuntimeError: if the model or the optimiser has another architecture.
    """
    load_model(state.policy.model, checkpoint.model_dir / "model.safetensors", device=str(state.policy.device))
    saved = torch.load(checkpoint.path / TRAINING, map_location="cpu", weights_only=True)
    state.optimizer.load_state_dict(saved["optimizer"])
    state.schedule.load_state_dict(saved["schedule"])
    state.optimizer_steps = saved["optimizer_steps"]
    state.skipped_steps = saved["skipped_steps"]
    _set_rng(saved["rng"])


def _training_dict(state: TrainingState) -> dict[str, Any]:
    return {
        "optimizer": state.optimizer.state_dict(),
        "schedule": state.schedule.state_dict(),
        "optimizer_steps": state.optimizer_steps,
        "skipped_steps": state.skipped_steps,
        "rng": _get_rng(),
    }


def _get_rng() -> dict[str, Any]:
    numpy_state = np.random.get_state(legacy=False)
    keys = numpy_state["state"]
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {"key": keys["key"].tolist(), "pos": keys["pos"]}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_rng(saved: Mapping[str, Any]) -> None:
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    keys = saved["numpy"]["state"]
    np.random.set_state({**saved["numpy"], "state": {**keys, "key": np.array(keys["key"], dtype=np.uint32)}})
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(saved["cuda"])


def _seal(directory: Path) -> int:
    """Flushes all files, writes the manifest last, flushes it and the directories; gives the size in bytes."""
    files = sorted(f for f in directory.rglob("*") if f.is_file())
    for file in files:
        _sync(file)
    digests = {str(f.relative_to(directory)): _sha256(f) for f in files}
    (directory / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": digests}, indent=1, sort_keys=True))
    _sync(directory / MANIFEST)
    for folder in (*(d for d in directory.rglob("*") if d.is_dir()), directory):
        _sync(folder)
    return sum(f.stat().st_size for f in files)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
