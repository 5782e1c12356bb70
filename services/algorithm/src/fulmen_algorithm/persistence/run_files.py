"""The folder of one run: `run.json`, `events.jsonl`, `consumed.jsonl`, `versions.jsonl`, `notes.json`, folders.

Invariant: `run.json` is always whole, and `consumed.jsonl` holds at least what the newest checkpoint counts.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from fulmen_algorithm.domain.events import Event
from fulmen_algorithm.domain.ports import SavedModel
from fulmen_algorithm.domain.run import TrainingRun
from fulmen_algorithm.persistence.files import append_json_lines, append_line, read_lines, replace_file, truncate
from fulmen_algorithm.training.policy import PolicyModel

_RUN = TypeAdapter(TrainingRun)
_EVENT = TypeAdapter(Event)


class RunFiles:
    """Reads and writes the files of one run."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is not there."""
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
    def bundle(self) -> Path:
        """Folder of the unpacked bundle."""
        return self.folder / "bundle"

    @property
    def initial(self) -> Path:
        """Folder of the model that the run's own script builds."""
        return self.folder / "initial"

    @property
    def _consumed(self) -> Path:
        return self.folder / "consumed.jsonl"

    @property
    def _versions(self) -> Path:
        return self.folder / "versions.jsonl"

    def save_run(self, run: TrainingRun) -> None:
        """Replaces `run.json`."""
        replace_file(self.folder / "run.json", _RUN.dump_json(run, indent=1))

    def load_run(self) -> TrainingRun | None:
        """Reads `run.json`; None if the run was never saved."""
        path = self.folder / "run.json"
        return _RUN.validate_json(path.read_bytes()) if path.exists() else None

    def read(self) -> list[Event]:
        """Reads `events.jsonl`."""
        return read_lines(self.folder / "events.jsonl", _EVENT.validate_json)

    def append(self, event: Event) -> None:
        """Appends to `events.jsonl`."""
        append_line(self.folder / "events.jsonl", _EVENT.dump_json(event, exclude_none=True))

    def append_consumed(self, records: Sequence[Mapping[str, object]]) -> int:
        """Appends to `consumed.jsonl`; returns its size in bytes."""
        return append_json_lines(self._consumed, list(records))

    def truncate_consumed(self, size_bytes: int) -> None:
        """Cuts `consumed.jsonl` back to what a checkpoint counts."""
        truncate(self._consumed, size_bytes)

    def append_version(self, record: Mapping[str, object]) -> None:
        """Appends to `versions.jsonl`."""
        append_json_lines(self._versions, [record])

    def versions(self) -> list[dict[str, object]]:
        """Reads `versions.jsonl`: every version that the run ever published."""
        return read_lines(self._versions, json.loads)

    def save_note(self, name: str, note: Mapping[str, object]) -> None:
        """Keeps a note for the report in `notes.json`."""
        notes = {**self.notes(), name: dict(note)}
        replace_file(self.folder / "notes.json", json.dumps(notes, indent=1).encode())

    def notes(self) -> dict[str, dict[str, object]]:
        """Reads `notes.json`."""
        path = self.folder / "notes.json"
        return json.loads(path.read_bytes()) if path.exists() else {}

    def save_model(self, policy: PolicyModel, step: int) -> SavedModel:
        """Writes the weights to `models/<step>-<checksum>`; the folder appears whole."""
        self.models.mkdir(exist_ok=True)
        aside = self.models / ".writing"
        shutil.rmtree(aside, ignore_errors=True)
        policy.save(aside)
        digest = weights_digest(aside)
        path = self.models / f"{step:06d}-{digest[:12]}"
        if path.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(path)
        return SavedModel(path=path, sha256=digest, size_bytes=sum(f.stat().st_size for f in path.iterdir()))

    def prune_models(self, keep: Sequence[Path]) -> None:
        """Removes all model folders but these."""
        for path in self.models.iterdir() if self.models.is_dir() else ():
            if path not in keep:
                shutil.rmtree(path)


def weights_digest(model_dir: Path) -> str:
    """Computes the SHA-256 over the safetensors files of a model folder, in the order of their names.

    Raises:
        FileNotFoundError: if there is none.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"No safetensors file in {model_dir}.")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
