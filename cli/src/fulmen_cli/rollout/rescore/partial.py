"""The scores so far, in a file from which an interrupted rescoring resumes.

Invariant: an incomplete line is ignored; only scores are kept, so failed rollouts are tried again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from fulmen.scores import GraderIdentity, RolloutScore, Source, score_of_line, score_to_line
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["Compared", "Partial", "opened", "partial_path"]

FOLDER: Final = "rescoring"
KEY_CHARS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A rollout's score, and the final reward that it had before; None if it had none."""

    score: RolloutScore
    old: float | None


@dataclass(slots=True, kw_only=True)
class Partial:
    """Results so far, by rollout."""

    done: dict[str, Compared]
    file: BinaryIO | None = field(repr=False)

    def add(self, result: Compared) -> None:
        """Adds a result; a score is in the file when this returns.

        Raises:
            CommandFailed: if the file cannot be written.
        """
        self.done[result.score.rollout] = result
        if self.file is not None and result.score.problem is None:
            old = json.dumps(result.old).encode()
            try:
                self.file.write(old + b"\t" + score_to_line(result.score) + b"\n")
                self.file.flush()
            except OSError as error:
                raise _unusable(self.file.name, error) from None


def partial_path(state_dir: Path, grader: GraderIdentity, source: Source, store: str) -> Path:
    """Returns the path for one grader, selection and store."""
    key = json.dumps([grader.digest, asdict(source), store], sort_keys=True)
    return state_dir / FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:KEY_CHARS]}.jsonl"


@contextmanager
def opened(path: Path | None, *, restart: bool = False) -> Iterator[Partial]:
    """Opens the results of an earlier run, if any; None keeps results in memory alone.

    Raises:
        CommandFailed: if the file cannot be used, or another process is at the same work.
    """
    if path is None:
        yield Partial(done={}, file=None)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise _unusable(str(path), error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"The same rescoring is running in another process, which holds {path}."
            raise CommandFailed(text, exit_code=Exit.CONFLICT) from None
        known, whole = ({}, 0) if restart else _read(file)
        # Drop the incomplete last line of a killed process.
        file.truncate(whole)
        yield Partial(done=known, file=file)


def _read(file: BinaryIO) -> tuple[dict[str, Compared], int]:
    """Returns the results before the first incomplete line, and the offset of that line."""
    found: dict[str, Compared] = {}
    whole = 0
    file.seek(0)
    for line in file:
        old, tab, score = line.partition(b"\t")
        if not (tab and line.endswith(b"\n")):
            break
        try:
            result = Compared(score=score_of_line(score), old=json.loads(old))
        except ValueError:
            break
        found[result.score.rollout] = result
        whole += len(line)
    return found, whole


def _unusable(path: str, error: OSError) -> CommandFailed:
    return CommandFailed(f"{path} cannot be written: {error.strerror or error}.")
