"""Takes the files that a model-building function wrote as data.

Invariant: a file is copied only if no reader of it runs code. Whatever the function left ends in a copy or in `RunFailed`.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fulmen.models.files import DATA_SUFFIXES, MAX_FILES
from fulmen_algorithm.runs.failure import RunFailed

MAX_DEPTH: Final = 32
MAX_NAME_BYTES: Final = 1024

_SHOWN_CHARS: Final = 100
_BLOCK_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Something in a folder: its path below it, and its status without following links."""

    name: str
    status: os.stat_result


def take(source: Path, target: Path, limit_bytes: int) -> None:
    """Copies what a function wrote; all its processes are dead.

    Raises:
        RunFailed: if a file is not data, or they are too many, too large or too deep; lists the first of them.
    """
    try:
        found = list(_files(source, limit_bytes))
    except OSError as error:
        raise RunFailed(f"What the policy was built with cannot be read: {error.strerror}.") from error
    refused = [each.name for each in found if not _is_data(each)]
    if refused:
        raise RunFailed(
            f"The policy was built with files that are not read as data: {_named(refused)}. Weights are taken as safetensors "
            f"(`save_pretrained(folder)`), the rest as {', '.join(sorted(DATA_SUFFIXES))}."
        )
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for each in found:
        copy = target / each.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            read = stack.enter_context(os.fdopen(_opened(source, each.name), "rb"))
            shutil.copyfileobj(read, stack.enter_context(copy.open("xb")), 2**20)


def check_written(folders: Iterable[Path], limit_bytes: int) -> None:
    """Checks folders that a function is writing. Blocks.

    Raises:
        RunFailed: if one of them holds more than it may.
    """
    for folder in folders:
        occupied_bytes = 0
        # What was moved or deleted meanwhile is seen the next time.
        with suppress(OSError):
            for count, each in enumerate(_walk(folder, hidden=True), start=1):
                occupied_bytes += each.status.st_blocks * _BLOCK_BYTES
                _check_size(count, occupied_bytes, limit_bytes)


def _files(source: Path, limit_bytes: int) -> Iterator[_Found]:
    """Yields everything except folders and hidden names, which libraries use for caches."""
    total_bytes = 0
    for count, each in enumerate(_walk(source, hidden=False), start=1):
        total_bytes += each.status.st_size
        _check_size(count, total_bytes, limit_bytes)
        if not stat.S_ISDIR(each.status.st_mode):
            yield each


def _check_size(count: int, size_bytes: int, limit_bytes: int) -> None:
    if count > MAX_FILES or size_bytes > limit_bytes:
        raise RunFailed(
            f"The policy was built with more than {MAX_FILES} files or {limit_bytes} bytes "
            "(FULMEN_ALGORITHM_BUILD_DISK_BYTES)."
        )


def _walk(source: Path, *, hidden: bool) -> Iterator[_Found]:
    todo = [""]
    while todo:
        name = todo.pop()
        if name.count("/") > MAX_DEPTH or len(os.fsencode(name)) > MAX_NAME_BYTES:
            raise RunFailed(
                f"The policy was built with files more than {MAX_DEPTH} folders deep, or with names of more than "
                f"{MAX_NAME_BYTES} bytes."
            )
        with os.scandir(source / name) as entries:
            for entry in entries:
                if entry.name.startswith(".") and not hidden:
                    continue
                inner = f"{name}{entry.name}"
                yield _Found(name=inner, status=entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    todo.append(f"{inner}/")


def _is_data(found: _Found) -> bool:
    status = found.status
    # A name that is not valid text could not be shown in messages or listed in versions.
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and found.name.isprintable()
    return is_plain and Path(found.name).suffix in DATA_SUFFIXES


def _opened(source: Path, name: str) -> int:
    try:
        return os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise RunFailed(f"{name}, with which the policy was built, cannot be read: {error.strerror}.") from error


def _named(names: Sequence[str]) -> str:
    shown = [(name if name.isprintable() else ascii(name))[:_SHOWN_CHARS] for name in names[:10]]
    return ", ".join(shown) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
