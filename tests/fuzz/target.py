"""What a target is, what counts as a finding, and where inputs are kept."""

from __future__ import annotations

import hashlib
import importlib
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fulmen.errors import FulmenError, InternalError
from tests.fuzz.mutation import Mutation, mutate_bytes

__all__ = [
    "CORPUS",
    "Finding",
    "Leak",
    "PureTarget",
    "check_text",
    "kept_inputs",
    "live_targets",
    "load",
    "pure_targets",
    "signature",
]

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
ROOT = FOLDER.parent.parent

INTERNAL_TEXT = re.compile(
    r"Traceback|\.py\", line|/site-packages|/src/|asyncpg|psycopg|postgresql://|\bselect .* from\b|insert into|<class '|"
    r"object at 0x|NoneType|has no attribute|object is not|unhashable|takes \d+ positional|codec can't|"
    r"\b(?:Attribute|Type|Key|Index|Value|Unicode\w+|Overflow|Recursion|Assertion)Error\b"
)
"""What no answer may contain: places in our code, SQL, words of Python's own errors."""


class Leak(Exception):
    """A text for a client contains internal text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PureTarget:
    """Code that reads an input in this process.

    Attributes:
        run: Reads an input; anything raised but a refusal is a finding.
        seeds: Valid inputs to start from.
        refusals: Errors that refuse an input.
        mutate: Changes an input by its structure.
        instrumented: Packages whose coverage guides the search.
    """

    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refusals: tuple[type[Exception], ...] = (FulmenError,)
    mutate: Mutation = mutate_bytes
    instrumented: Sequence[str] = ()

    def try_input(self, data: bytes) -> None:
        """Runs an input; a refusal is fine if its text is."""
        try:
            self.run(data)
        except self.refusals as refusal:
            if isinstance(refusal, InternalError):
                raise
            check_text(text_of(refusal))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input that failed, and how.

    Attributes:
        where: Kind of error and place in our code; one finding is kept for each.
    """

    target: str
    where: str
    what: str
    data: bytes


def check_text(text: str) -> None:
    """Raises Leak if a text for a client contains internal text."""
    if found := INTERNAL_TEXT.search(text):
        raise Leak(f"{found.group()!r} in {text[:300]!r}")


def text_of(error: Exception) -> str:
    """Returns everything that a client sees of an error."""
    if isinstance(error, FulmenError):
        return f"{error.message} {dict(error.metadata)} {[f'{v.field} {v.description}' for v in error.violations]}"
    return str(error)


def signature(error: BaseException) -> str:
    """Returns the kind of an error and the innermost place in our code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    ours = [f for f in frames if "/tests/" not in f.filename and "/.venv/" not in f.filename] or frames
    place = f" at {Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{place}"


def pure_targets() -> list[str]:
    """Returns the names of the targets that run in one process."""
    return sorted(path.stem for path in (FOLDER / "targets").glob("[a-z]*.py"))


def live_targets() -> list[str]:
    """Returns the names of the targets that call services."""
    return sorted(path.stem for path in (FOLDER / "live").glob("[a-z]*.py"))


def load(name: str) -> PureTarget:
    """Imports a target."""
    target: PureTarget = importlib.import_module(f"tests.fuzz.targets.{name}").TARGET
    return target


def kept_inputs(name: str) -> list[Path]:
    """Returns the files of a target's corpus."""
    return sorted((CORPUS / name).glob("*"))


def input_name(data: bytes) -> str:
    """Returns the file name of an input."""
    return hashlib.sha256(data).hexdigest()[:12]
