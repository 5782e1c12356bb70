"""The files of a container below `/fulmen`, as tar archives.

Invariant: input and bundle are read-only and owned by a user that no image has: with all capabilities dropped, not even
root in the container can change them. Everyone can write to `work`.
"""

import io
import tarfile
import tempfile
from pathlib import Path

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
