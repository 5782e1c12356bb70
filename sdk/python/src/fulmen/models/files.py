"""Folders of weights: which files may be in one, and the digest that names it.

Invariant: a file is allowed only if no reader of it runs code. Nothing here imports grpc.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fulmen.errors import Violation
from fulmen.ids import NOT_DOTS

__all__ = [
    "ALIAS",
    "DATA_SUFFIXES",
    "DIGEST",
    "MAX_FILES",
    "ModelFile",
    "alias_problem",
    "listed_files",
    "manifest_digest",
    "manifest_problems",
    "path_problem",
    "read_manifest",
]

MAX_FILES: Final = 10_000
MAX_PATH: Final = 255
MAX_PARTS: Final = 8
DATA_SUFFIXES: Final = frozenset({".safetensors", ".json", ".jsonl", ".jinja", ".txt", ".model", ".tiktoken", ".md"})
"""Files whose readers run no code in them. Pickles (`.bin`, `.pt`) and Python are none."""
ALIAS: Final = re.compile(rf"{NOT_DOTS}[a-z0-9._-]{{1,63}}")
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
CONFIG: Final = "config.json"
WEIGHTS_SUFFIX: Final = ".safetensors"

_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}"
_PATH: Final = re.compile(rf"{_PART}(?:/{_PART})*")
_EMPTY: Final = hashlib.sha256().hexdigest()
_REPORTED: Final = 50
_SHOWN: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file of a model; see `fulmen.algorithm.v1.WeightFile`."""

    path: str
    size_bytes: int
    sha256: str


def path_problem(path: str) -> str:
    """Returns why a file of this path may not be in a model; empty if it may."""
    if not _PATH.fullmatch(path) or len(path) > MAX_PATH or path.count("/") >= MAX_PARTS:
        return (
            f"must be at most {MAX_PATH} characters and {MAX_PARTS} parts of [A-Za-z0-9._+=@-], separated by /, "
            "that begin with [A-Za-z0-9_]"
        )
    if Path(path).suffix not in DATA_SUFFIXES:
        return f"is not a data file of a model: weights must be safetensors, other files =>  {', '.join(sorted(DATA_SUFFIXES))}"
    return ""


def alias_problem(alias: str) -> str:
    """Returns why a model may not have an alias; empty if it may."""
    return "" if ALIAS.fullmatch(alias) else "must be 1 to 63 of [a-z0-9._-], not dots alone"


def manifest_problems(files: Sequence[ModelFile]) -> list[Violation]:
    """Returns every problem of a manifest; the first `_REPORTED` files are described, the others counted."""
    if not 1 <= len(files) <= MAX_FILES:
        return [Violation(field="files", description=f"has {len(files)} files; must be 1 to {MAX_FILES}")]
    found = [
        Violation(field=f"files[{number}]", description=f"{file.path[:_SHOWN]!a} {text}")
        for number, (file, text) in enumerate(_problems_by_file(files))
        if text
    ]
    if len(found) > _REPORTED:
        rest = len(found) - _REPORTED
        found = [*found[:_REPORTED], Violation(field="files", description=f"{rest} more files are not allowed")]
    if not any(file.path == CONFIG for file in files):
        found.append(Violation(field="files", description=f"has no {CONFIG}"))
    if not any(file.path.endswith(WEIGHTS_SUFFIX) for file in files):
        found.append(Violation(field="files", description=f"has no weights ({WEIGHTS_SUFFIX})"))
    return found


def manifest_digest(files: Iterable[ModelFile]) -> str:
    """Computes the digest that names a model; see `fulmen.algorithm.v1.BeginUploadRequest.files`."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda each: each.path):
        digest.update(f"{file.sha256} {file.size_bytes} {file.path}\n".encode())
    return digest.hexdigest()


def listed_files(folder: Path, *, follow_links: bool = False) -> tuple[list[str], list[str]]:
    """Lists a folder without its hidden names, which libraries use for caches, ordered by path.

    Args:
        folder: the folder.
        follow_links: whether links to files are followed, as in the cache of a hub; links to folders are never
            followed.

    Returns:
        The paths that are allowed in a model, and the paths that are not, such as pickles and links.

    Raises:
        OSError: if it cannot be read.
    """
    allowed, refused = list[str](), list[str]()
    for path, mode in _walk(folder, follow_links=follow_links):
        is_plain = stat.S_ISREG(mode) and not path_problem(path)
        (allowed if is_plain else refused).append(path)
    return sorted(allowed), sorted(refused)


def read_manifest(folder: Path, *, follow_links: bool = False) -> list[ModelFile]:
    """Reads all allowed files of a folder, ordered by path; see `listed_files`.

    Raises:
        OSError: if one cannot be read.
    """
    found = []
    for path in listed_files(folder, follow_links=follow_links)[0]:
        with (folder / path).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size_bytes = os.fstat(file.fileno()).st_size
        found.append(ModelFile(path=path, size_bytes=size_bytes, sha256=sha256))
    return found


def _walk(folder: Path, *, follow_links: bool) -> Iterator[tuple[str, int]]:
    """Yields everything except folders, with its mode, down to the maximum depth of a model."""
    todo = [""]
    while todo:
        name = todo.pop()
        with os.scandir(folder / name) as entries:
            for entry in entries:
                inner = f"{name}{entry.name}"
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False) and name.count("/") < MAX_PARTS:
                    todo.append(f"{inner}/")
                else:
                    # A link that leads nowhere is a link.
                    follow = follow_links and entry.is_file()
                    yield inner, entry.stat(follow_symlinks=follow).st_mode


def _problems_by_file(files: Sequence[ModelFile]) -> Iterator[tuple[ModelFile, str]]:
    """Yields each file with its problem; empty if it has none."""
    seen: dict[str, int] = {}
    folders = {parent for file in files if len(file.path) <= MAX_PATH for parent in _parents(file.path)}
    for number, file in enumerate(files):
        first = seen.setdefault(file.path.lower(), number)
        if problem := path_problem(file.path):
            yield file, problem
        elif first != number:
            # Some file systems do not distinguish cases.
            before = files[first].path
            yield file, "occurs twice" if before == file.path else f"differs from {before} in case only"
        elif file.path in folders:
            yield file, "is a folder of other files"
        elif file.size_bytes < 0:
            yield file, "size_bytes must not be negative"
        elif not DIGEST.fullmatch(file.sha256):
            yield file, "sha256 must be 64 lowercase hexadecimal digits"
        elif not file.size_bytes and file.sha256 != _EMPTY:
            yield file, "sha256 is not the digest of an empty file"
        else:
            yield file, ""


def _parents(path: str) -> Iterator[str]:
    parts = path.split("/")[:-1]
    return ("/".join(parts[: count + 1]) for count in range(len(parts)))
