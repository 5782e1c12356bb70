"""Durable files: files are replaced atomically; lines are appended completely or removed at the next start."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from fulmen_algorithm.training.files import sync

Parsed = TypeVar("Parsed")
BLOCK = 65536
LINE_AND_THE_ONE_BEFORE = 2
"""Line ends to find from the end of a file before its last complete line is known."""


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file: write aside, fsync, rename, fsync of the folder."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync(path.parent)


def append_line(path: Path, content: bytes) -> None:
    """Appends one line and makes it durable."""
    _append(path, content + b"\n")


def append_json_lines(path: Path, records: list[Mapping[str, object]]) -> int:
    """Appends records as JSON lines with one fsync.

    Returns:
        Size of the file afterwards, in bytes.
    """
    return _append(path, b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in records))


def _append(path: Path, content: bytes) -> int:
    """Durably appends all of the content or nothing; returns the new size of the file, in bytes."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            # A full disk may leave a partial line, which the next append would continue.
            file.truncate(before)
            raise
        return before + len(content)


def truncate(path: Path, size_bytes: int) -> None:
    """Truncates a file to a size, creating it if needed.

    Raises:
        ValueError: if the file is shorter: acknowledged data were lost.
    """
    with path.open("ab") as file:
        actual = file.tell()
        if actual < size_bytes:
            raise ValueError(f"{path.name} has {actual} bytes; the checkpoint lists {size_bytes}.")
        file.truncate(size_bytes)
        file.flush()
        os.fsync(file.fileno())


def last_line(path: Path) -> bytes | None:
    """Reads the last complete line, from the end; removes a truncated line behind it. None if the file has none."""
    if not path.exists():
        return None
    tail, start = b"", path.stat().st_size
    with path.open("rb") as file:
        while start and tail.count(b"\n") < LINE_AND_THE_ONE_BEFORE:
            start, size = max(0, start - BLOCK), min(start, BLOCK)
            file.seek(start)
            tail = file.read(size) + tail
    whole = tail.rfind(b"\n") + 1
    if whole != len(tail):
        truncate(path, start + whole)
    lines = tail[:whole].splitlines()
    return lines[-1] if lines else None


def read_lines(path: Path, parse: Callable[[bytes], Parsed], *, repair: bool = True) -> list[Parsed]:
    """Reads all complete lines; removes a truncated last line.

    `repair` False leaves the file unchanged, for readers concurrent with a writer.

    Raises:
        ValueError: if a complete line does not parse.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if repair and whole != len(content):
        truncate(path, whole)
    return [parse(line) for line in content[:whole].splitlines()]
