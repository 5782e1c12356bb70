"""Unpacks agents' files, once for each content.

Invariant: a bundle's directory appears whole or not at all, and holds nothing from outside of its archive: links and
names that lead elsewhere, devices and permissions beyond reading are refused by tarfile's `data` filter (PEP 706).
Attempts share it: nothing in it can be written to (by root it can).
"""

import io
import tarfile
import tempfile
import zlib
from pathlib import Path

from fulmen_runner.domain.errors import AgentFailed

MAX_UNPACKED_BYTES = 256 * 1024 * 1024
MAX_MEMBERS = 20_000

_READ_ONLY_DIRECTORY = 0o555
_UNREADABLE = (tarfile.TarError, EOFError, OSError, KeyError, ValueError, zlib.error)
"""What reading a malformed archive raises: KeyError of a link to nothing, ValueError of a name with NUL."""

_WRITABLE = 0o222


def unpack_bundle(archive: bytes, sha256_hex: str, work_dir: Path) -> Path:
    """Unpacks a tar.gz into a directory named by its digest and returns that; does nothing if it is there.

    Blocks: call it in a thread.

    Raises:
        AgentFailed: If the archive is not one, is too large when unpacked, or holds something unsafe.
    """
    target = work_dir / f"bundle-{sha256_hex}"
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
