"""Requests to and results of a container engine, importable without its client; a container's files, as tar archives.

Invariant: input and bundle are read-only and owned by a user that no image has: with all capabilities dropped, not even
root in the container can change them. Everyone can write to `work`.
"""

import io
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fulmen_runner.attempts.printed import PrintedTails

PullPolicy = Literal["missing", "always", "never"]

ROOT = "/fulmen"
TASK_FILE = f"{ROOT}/task"
WORK_DIR = f"{ROOT}/work"
REWARDS_FILE = f"{ROOT}/rewards.jsonl"
BUNDLE_DIR = f"{ROOT}/bundle"

NOBODY_ID = 65_533
"""User and group of read-only files; within the range that engines with user namespaces map."""

_OPEN_DIR, _OPEN_FILE, _READ_DIR, _READ_FILE = 0o777, 0o666, 0o555, 0o444
_EXECUTABLE = 0o111
_BUNDLE_NAME = "bundle"
_ROOT_MODE = 0o755


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOrder:
    """A container to run.

    Attributes:
        name: Unique name at the engine.
        config: Body of `POST /containers/create`.
        files: Archives (tar or tar.gz) unpacked at `files_at` before the start.
        files_at: Directory of the container, a volume.
        stdin: Standard input.
        result_path: Path of the file fetched at the end.
        output_kept_bytes: Size of the end of standard output that is kept.
        printed: Gets the end of both streams, however the container ends.
        output_allowed_bytes: Output above which the container is killed.
        result_allowed_bytes: Maximum size fetched of the file.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    files: Sequence[bytes | Path] = field(repr=False)
    files_at: str
    stdin: bytes = field(repr=False)
    result_path: str
    output_kept_bytes: int
    output_allowed_bytes: int
    result_allowed_bytes: int
    printed: PrintedTails = field(default_factory=PrintedTails)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEnd:
    """The end of a container.

    Attributes:
        exit_code: Exit code.
        stdout: End of its standard output.
        stderr: End of its standard error.
        flooded: Whether it exceeded the allowed output.
        out_of_memory: Whether the kernel killed a process for exceeding the memory limit.
        result: Content of the file at `result_path`, empty if there is none.
        result_cut: Whether the file is larger than allowed.
    """

    exit_code: int
    stdout: str
    stderr: str
    flooded: bool
    out_of_memory: bool
    result: bytes
    result_cut: bool


def attempt_archive(task: bytes) -> bytes:
    """Returns the files of one attempt as a tar: input, working directory and empty rewards file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(_member(".", tarfile.DIRTYPE, _ROOT_MODE))
        tar.addfile(_member("work", tarfile.DIRTYPE, _OPEN_DIR))
        tar.addfile(_member("rewards.jsonl", tarfile.REGTYPE, _OPEN_FILE))
        tar.addfile(_member("task", tarfile.REGTYPE, _READ_FILE, size=len(task)), io.BytesIO(task))
    return buffer.getvalue()


def bundle_archive(directory: Path) -> Path:
    """Packs an unpacked bundle into a tar.gz beside it, once; returns the path. Blocks."""
    target = directory.with_name(f"{directory.name}.tar.gz")
    if target.exists():
        return target
    with tempfile.NamedTemporaryFile(dir=directory.parent, prefix="packing-", delete=False) as file:
        try:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
                tar.add(directory, arcname=_BUNDLE_NAME, filter=_read_only)
            # Atomic; concurrent calls produce the same content.
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return target


def _read_only(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = NOBODY_ID
    member.uname = member.gname = ""
    if member.isdir():
        member.mode = _READ_DIR
    elif member.isreg():
        member.mode = _READ_FILE | (_EXECUTABLE if member.mode & _EXECUTABLE else 0)
    return member


def _member(name: str, kind: bytes, mode: int, *, size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size = kind, mode, size
    member.uid = member.gid = NOBODY_ID
    return member
