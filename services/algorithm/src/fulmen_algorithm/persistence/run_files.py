"""The folder of one run: `run.json`, `events.jsonl`, `consumed.jsonl`, `versions.jsonl`, `checkpoints/`, `models/`.

Invariant: `run.json` is always whole, and `consumed.jsonl` holds at least what the newest checkpoint counts.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from fulmen_algorithm.domain.events import Event
from fulmen_algorithm.domain.run import TrainingRun
from fulmen_algorithm.persistence.files import append_json_lines, append_line, read_lines, replace_file, truncate

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
