"""The folder of the virtual environments that runners have built, shared by all runners of a user on a machine.

Invariants: an environment is used only while it is locked (shared) and complete; it is built and deleted only while it is
locked exclusively, and marked as complete last, so that a killed build leaves nothing that is used. One of which files are
missing, as after a power cut or the cleaning of a temporary folder, is built again. The kernel releases the locks of a dead
runner. The sizes of complete environments never exceed the limit together.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import structlog

from fulmen_runner.attempts.errors import HostUnavailable
from fulmen_service_kit.isolation.trees import delete_tree

FOLDER_MODE: Final = 0o755
"""Users of attempts enter it and read what is in it; the runner's user alone writes."""

_COMPLETE: Final = "complete.json"
_LOCK: Final = ".lock"
_ROOM: Final = "room"
_POLL_S: Final = 0.05
_BLOCK_BYTES: Final = 512

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class VenvCache:
    """The environments.

    Attributes:
        folder: Their parent.
        limit_bytes: Most that complete environments take together.
        wait_s: Most that a build of another runner is waited for, in seconds.
        evicted_count: Environments that were deleted for others.
    """

    folder: Path
    limit_bytes: int
    wait_s: float
    evicted_count: int = 0
    _size_bytes: int = field(default=0)

    @property
    def size_bytes(self) -> int:
        """Size of the complete environments when room was last made."""
        return self._size_bytes

    async def held(self, name: str, build: Callable[[Path], Awaitable[None]]) -> "HeldFolder":
        """Returns an environment's folder, built if it does not exist; it is kept until it is released.

        Args:
            name: Name of the environment.
            build: Fills an empty folder.

        Raises:
            HostUnavailable: If the cache cannot be used, is full of environments in use, or another runner builds too long.
            Exception: What `build` raises.
        """
        await asyncio.to_thread(self._check_folder)
        deadline_s = time.monotonic() + self.wait_s
        folder = self.folder / name
        while True:
            if (lock := self._lock(name, fcntl.LOCK_SH)) is not None:
                with ExitStack() as undo:
                    undo.callback(os.close, lock)
                    if await asyncio.to_thread(_is_whole, folder):
                        os.utime(lock)
                        undo.pop_all()
                        return HeldFolder(folder=folder, lock=lock)
            # Never waited for: once another has built it, it is only to be read, and readers may keep it for long.
            if (lock := self._lock(name, fcntl.LOCK_EX)) is not None:
                try:
                    if not await asyncio.to_thread(_is_whole, folder):
                        await self._built(folder, build)
                finally:
                    # Locked again as a reader: a lock cannot be converted without a gap.
                    os.close(lock)
                continue
            await self._pause(name, deadline_s)

    async def _built(self, folder: Path, build: Callable[[Path], Awaitable[None]]) -> None:
        try:
            await asyncio.to_thread(_emptied, folder)
            await asyncio.to_thread(self._sweep)
            await build(folder)
            await self._completed(folder, await asyncio.to_thread(extent_of, folder))
        except BaseException:
            # Not in a thread: the runner may be ending, and the folder is useless.
            _delete(folder)
            _unlink(self._lock_file(folder.name))
            raise

    async def _completed(self, folder: Path, extent: "Extent") -> None:
        deadline_s = time.monotonic() + self.wait_s
        while (room := self._lock(_ROOM, fcntl.LOCK_EX)) is None:
            await self._pause(folder.name, deadline_s)
        try:
            await asyncio.to_thread(self._make_room, extent.size_bytes)
            marked = folder / f"{_COMPLETE}.new"
            marked.write_text(json.dumps(asdict(extent)))
            marked.rename(folder / _COMPLETE)
        finally:
            os.close(room)

    def _make_room(self, needed_bytes: int) -> None:
        """Deletes the environments that were used longest ago until another one fits."""
        extents = {name: _recorded(self.folder / name) for name in self._names()}
        sizes = {name: extent.size_bytes for name, extent in extents.items() if extent is not None}
        total_bytes = sum(sizes.values())
        for name in sorted(sizes, key=self._used_at):
            if total_bytes + needed_bytes <= self.limit_bytes:
                break
            if self._deleted(name):
                total_bytes -= sizes[name]
                self.evicted_count += 1
                _log.info("venv_evicted", venv=name, size_bytes=sizes[name])
        if total_bytes + needed_bytes > self.limit_bytes:
            raise HostUnavailable(
                f"runner has no space for a virtual environment of {needed_bytes} bytes: {total_bytes} of {self.limit_bytes} "
                "bytes (FULMEN_RUNNER_VENVS_BYTES) are in use"
            )
        self._size_bytes = total_bytes + needed_bytes

    def _sweep(self) -> None:
        """Deletes what killed builds have left."""
        for name in self._names():
            if _recorded(self.folder / name) is None and self._deleted(name):
                _log.info("venv_leftover_deleted", venv=name)

    def _deleted(self, name: str) -> bool:
        """Deletes an environment unless it is used or being built."""
        lock = self._lock(name, fcntl.LOCK_EX)
        if lock is None:
            return False
        try:
            # First: what is deleted only in part is not used.
            _unlink(self.folder / name / _COMPLETE)
            _delete(self.folder / name)
            _unlink(self._lock_file(name))
        finally:
            os.close(lock)
        return True

    def _lock(self, name: str, mode: int) -> int | None:
        """Returns an open lock; None if another process has it, or it was deleted meanwhile."""
        file = self._lock_file(name)
        lock = os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if _is_same(lock, file):
            return lock
        os.close(lock)
        return None

    async def _pause(self, name: str, deadline_s: float) -> None:
        if time.monotonic() >= deadline_s:
            raise HostUnavailable(
                f"virtual environment {name} is still being built, or used, by another attempt or runner"
            )
        await asyncio.sleep(_POLL_S)

    def _check_folder(self) -> None:
        """Makes the folder; its user alone may write in it.

        Raises:
            HostUnavailable: If others may, or it cannot be made.
        """
        try:
            if not self.folder.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.chmod(FOLDER_MODE)
            status = self.folder.lstat()
        except OSError as error:
            raise HostUnavailable(f"folder {self.folder} of virtual environments: {error.strerror}") from None
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            raise HostUnavailable(
                f"folder {self.folder} of virtual environments must be a folder that the runner's user owns and no one"
                " else can write (FULMEN_RUNNER_VENVS_DIR)"
            )

    def _names(self) -> Iterator[str]:
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                yield entry.name

    def _used_at(self, name: str) -> float:
        try:
            return self._lock_file(name).stat().st_mtime
        except OSError:
            return 0.0

    def _lock_file(self, name: str) -> Path:
        return self.folder / f"{name}{_LOCK}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFolder:
    """A complete environment that is not deleted before `release`."""

    folder: Path
    lock: int

    def release(self) -> None:
        """Allows its deletion."""
        os.close(self.lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What a folder takes.

    Attributes:
        size_bytes: Bytes on the disk, of each file once.
        entry_count: Number of its files and folders.
        content_bytes: Length of its files.
    """

    size_bytes: int
    entry_count: int
    content_bytes: int


def extent_of(folder: Path) -> Extent:
    """Returns what a folder takes, without the mark of completeness. Blocks."""
    seen: set[tuple[int, int]] = set()
    size_bytes = entry_count = content_bytes = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(place, name))  # noqa: PTH118  # Tens of thousands of files.
                if name == _COMPLETE:
                    continue
                entry_count += 1
                content_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
                if (identity := (status.st_dev, status.st_ino)) not in seen:
                    seen.add(identity)
                    size_bytes += status.st_blocks * _BLOCK_BYTES
    return Extent(size_bytes=size_bytes, entry_count=entry_count, content_bytes=content_bytes)


def _recorded(folder: Path) -> Extent | None:
    """Returns the extent of a complete environment; None if it is not complete."""
    try:
        found = Extent(**json.loads((folder / _COMPLETE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if all(isinstance(value, int) for value in asdict(found).values()) else None


def _is_whole(folder: Path) -> bool:
    """Returns whether an environment is complete, and none of its files is missing. Packages may have added some."""
    recorded = _recorded(folder)
    if recorded is None:
        return False
    now = extent_of(folder)
    whole = now.entry_count >= recorded.entry_count and now.content_bytes >= recorded.content_bytes
    if not whole:
        _log.warning("venv_damaged", venv=folder.name)
    return whole


def _emptied(folder: Path) -> None:
    _delete(folder)
    folder.mkdir()
    folder.chmod(FOLDER_MODE)


def _is_same(file: int, path: Path) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _delete(folder: Path) -> None:
    try:
        delete_tree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("venv_not_deleted", path=str(folder), error=str(error))


def _unlink(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
