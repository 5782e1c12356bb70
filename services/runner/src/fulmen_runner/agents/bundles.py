"""Unpacks agents' files, once for each content.

Invariant: a bundle's directory appears whole or not at all, and holds nothing from outside of its archive: links and
names that lead elsewhere, devices and permissions beyond reading are refused by tarfile's `data` filter (PEP 706).
Attempts share it: nothing in it can be written to (by root it can). It is deleted when its last user has ended.
"""

import io
import tarfile
import tempfile
import threading
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import structlog

from fulmen_runner.agents.python.threads import run_in_thread
from fulmen_runner.agents.specification import Bundle
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.uses import Uses
from fulmen_runner.attempts.workspace import delete_tree

MAX_UNPACKED_BYTES = 256 * 1024 * 1024
MAX_MEMBERS = 20_000

_READ_ONLY_DIRECTORY = 0o555
_UNREADABLE = (tarfile.TarError, EOFError, OSError, KeyError, ValueError, zlib.error)
"""What reading a malformed archive raises: KeyError of a link to nothing, ValueError of a name with NUL."""

_WRITABLE = 0o222
_PREFIX = "bundle-"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedBundle:
    """A bundle's directory, and who uses it."""

    directory: Path
    uses: Uses


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedBundles:
    """The bundles that are in use, each unpacked once.

    Attributes:
        work_dir: Where they are.
    """

    work_dir: Path
    _used: dict[str, UnpackedBundle] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)

    async def unpacked(self, bundle: Bundle) -> UnpackedBundle:
        """Unpacks a bundle if it is not there; the caller ends the use that begins with this.

        Raises:
            AgentFailed: As `unpack_bundle`.
        """
        digest = bundle.sha256_hex
        used = self._used.get(digest)
        # In use from before it is there: what is being unpacked must not be deleted meanwhile.
        if used is None or not used.uses.begin():
            # Never the same directory again: a process may still wait in the one that is deleted.
            directory = _directory(self.work_dir, f"{digest}-{next(self._numbers)}")
            used = UnpackedBundle(directory=directory, uses=Uses(let_go=partial(self._let_go, digest)))
            self._used[digest] = used
        with ExitStack() as undo:
            undo.callback(used.uses.end)
            await run_in_thread(unpack_bundle, bundle.archive, used.directory.name.removeprefix(_PREFIX), self.work_dir)
            undo.pop_all()
        return used

    def _let_go(self, digest: str) -> None:
        directory = self._used.pop(digest).directory
        if directory.is_dir():
            threading.Thread(target=_delete, args=(directory,), name="bundle deletion", daemon=True).start()


def unpack_bundle(archive: bytes, name: str, work_dir: Path) -> Path:
    """Unpacks a tar.gz into a directory of a name and returns that; does nothing if it is there.

    Blocks: call it in a thread.

    Raises:
        AgentFailed: If the archive is not one, is too large when unpacked, or holds something unsafe.
    """
    target = _directory(work_dir, name)
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=work_dir) as directory:
        inside = Path(directory, "bundle")
        inside.mkdir()
        try:
            _extract(archive, inside)
        except _UNREADABLE as error:
            raise AgentFailed(f"The agent's bundle cannot be unpacked: {error}") from None
        _protect(inside)
        try:
            inside.rename(target)
            # Only now: a directory that cannot be written to cannot be moved.
            target.chmod(_READ_ONLY_DIRECTORY)
        except OSError:
            # Another attempt was faster; the content is the same.
            if not target.is_dir():
                raise
    return target


def _directory(work_dir: Path, name: str) -> Path:
    return work_dir / f"{_PREFIX}{name}"


def _delete(directory: Path) -> None:
    try:
        delete_tree(directory)
    except OSError as error:
        _log.warning("bundle_not_deleted", path=str(directory), error=str(error))


def _protect(directory: Path) -> None:
    """Takes the right to write to what is in a directory from everybody."""
    for path in directory.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~_WRITABLE)


def _extract(archive: bytes, directory: Path) -> None:
    total_bytes = 0
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for count, member in enumerate(tar, start=1):
            total_bytes += member.size
            if count > MAX_MEMBERS or total_bytes > MAX_UNPACKED_BYTES:
                raise AgentFailed(
                    f"The agent's bundle holds more than {MAX_MEMBERS} files or {MAX_UNPACKED_BYTES} bytes."
                )
            tar.extract(member, directory, filter="data")
