"""Unpacks bundles: archives of files (tar.gz) that a tenant made, so nothing in them is trusted.

Invariant: nothing is written outside the folder, and neither memory, files, depth nor time grows beyond the limits, whatever the
archive contains. Nothing is written through a link, and a link begins with its way up, so that its target can be read from its
text: by induction no link leads outside. tarfile's `data` filter (PEP 706), which resolves paths and stops where they become too
long (CVE-2025-4517), only adds to that: it rejects devices and special permissions.
"""

import errno
import gzip
import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Final

MAX_UNPACKED_BYTES: Final = 256 * 1024 * 1024
MAX_MEMBERS: Final = 20_000
MAX_DEPTH: Final = 32
MAX_NAME_BYTES: Final = 1024
MAX_LINKS: Final = 1000
_UP: Final = ".."
_SHOWN_CHARS: Final = 100
_READABLE, _SEARCHABLE, _WRITABLE = 0o444, 0o111, 0o222
_HEADERS_BYTES: Final = MAX_MEMBERS * 3 * tarfile.BLOCKSIZE
"""Room for headers and padding beside the content."""

_MACHINE_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS, errno.ENOMEM}
)
_MALFORMED: Final = (
    tarfile.TarError, EOFError, KeyError, IndexError, ValueError, OverflowError, RecursionError, struct.error, zlib.error,
)  # fmt: skip


class BundleInvalid(Exception):
    """A bundle is not an archive, or exceeds a limit; the text has the reason and contains no path of this
    machine."""


def unpack(archive: bytes, folder: Path) -> None:
    """Unpacks a tar.gz into an empty folder. Blocks. On an error the folder contains a part of the files.

    Raises:
        BundleInvalid: If the archive is malformed, exceeds a limit, or has a member that leads outside.
        OSError: If the files cannot be written.
    """
    try:
        _extract(archive, folder)
    except _MALFORMED as error:
        raise BundleInvalid(_reason(error)) from None
    except OSError as error:
        if error.errno in _MACHINE_ERRORS:
            raise
        raise BundleInvalid(_reason(error)) from None


def protect(folder: Path) -> None:
    """Makes everything in an unpacked bundle readable for all users and writable for none. Blocks."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            more = _READABLE | (_SEARCHABLE if mode & _SEARCHABLE else 0)
            path.chmod((mode | more) & ~_WRITABLE)


def _extract(archive: bytes, folder: Path) -> None:
    total_bytes, links = 0, 0
    with (
        gzip.GzipFile(fileobj=io.BytesIO(archive)) as unzipped,
        tarfile.open(fileobj=_Bounded(unzipped, MAX_UNPACKED_BYTES + _HEADERS_BYTES), mode="r|") as tar,
    ):
        for count, member in enumerate(tar, start=1):
            total_bytes += member.size
            links += member.issym() or member.islnk()
            if count > MAX_MEMBERS or total_bytes > MAX_UNPACKED_BYTES:
                raise BundleInvalid(f"it exceeds {MAX_MEMBERS} files or {MAX_UNPACKED_BYTES} bytes when unpacked")
            if links > MAX_LINKS:
                raise BundleInvalid(f"it has more than {MAX_LINKS} links")
            if len(member.name.encode(errors="replace")) > MAX_NAME_BYTES or member.name.count("/") >= MAX_DEPTH:
                raise BundleInvalid(
                    f"a name in it is longer than {MAX_NAME_BYTES} bytes or more than {MAX_DEPTH} folders deep"
                )
            _check_place(member, folder)
            tar.extract(member, folder, filter="data")


def _check_place(member: tarfile.TarInfo, folder: Path) -> None:
    """Checks that a member is inside the folder, whatever links are in it.

    Raises:
        BundleInvalid: If it is not.
    """
    name = _plain(member.name, folder)
    leads_out = name is None or (member.islnk() and not _plain(member.linkname, folder))
    if name is not None and member.issym():
        target = [part for part in member.linkname.split("/") if part not in ("", ".")]
        up = next((count for count, part in enumerate(target) if part != _UP), len(target))
        leads_out = member.linkname.startswith("/") or _UP in target[up:] or up >= len(name)
    if leads_out:
        raise BundleInvalid(f"{member.name[:_SHOWN_CHARS]!r} leads out of the folder, or through a link")


def _plain(name: str, folder: Path) -> list[str] | None:
    """Returns the parts of a path in the folder; None if it leads up, or is or passes a link."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    place = folder
    for part in parts:
        place = place / part
        if part == _UP or place.is_symlink():
            return None
    return parts


def _reason(error: Exception) -> str:
    """Returns the reason without the name of a file of this machine."""
    if isinstance(error, tarfile.FilterError):
        return f"{error.tarinfo.name[:_SHOWN_CHARS]!r} is a device, or leads out of the folder"
    return (error.strerror if isinstance(error, OSError) else str(error)) or "it is not a tar.gz archive"


class _Bounded(io.RawIOBase):
    """A stream that ends with an error after a number of bytes: a few bytes of gzip can expand to gigabytes."""

    def __init__(self, stream: gzip.GzipFile, limit_bytes: int) -> None:
        self._stream, self._left_bytes = stream, limit_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size, io.DEFAULT_BUFFER_SIZE) if size >= 0 else io.DEFAULT_BUFFER_SIZE)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise BundleInvalid(f"it exceeds {MAX_UNPACKED_BYTES} bytes when unpacked")
        return data
