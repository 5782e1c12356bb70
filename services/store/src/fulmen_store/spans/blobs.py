"""Span payloads outside the database: in a folder, or in an object store such as S3.

Invariants: content is durable before `put` or `write` returns, so a row that references it can be committed afterwards; what
`put` names by its SHA-256 is written idempotently, and a read of it returns the written content or fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from fulmen.errors import BlobMissing, BlobStorageUnavailable
from fulmen_service_kit.errors import StartupError
from fulmen_store.spans.blob_refs import BlobRef

__all__ = ["BlobStorage", "Blobs", "FolderStorage", "open_storage"]

MAX_CONCURRENT: Final = 16
CALL_LIMIT_S: Final = 30.0
# Some tens of MB each.
SEGMENT_LIMIT_S: Final = 120.0
_UNFINISHED: Final = ".writing-"


class BlobStorage(Protocol):
    """Named bytes. Every method may raise OSError, or FileNotFoundError for an unknown name."""

    async def write(self, key: str, content: bytes) -> None:
        """Stores content durably; replaces existing content."""
        ...

    async def read(self, key: str) -> bytes:
        """Returns the stored content."""
        ...

    async def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Returns parts of the stored content, each given by its first byte and its size; shorter ones at its end."""
        ...

    async def remove(self, keys: Sequence[str]) -> None:
        """Removes names; ignores missing ones."""
        ...

    async def remove_folder(self, folder: str) -> None:
        """Removes all names that begin with the folder; does nothing if there are none."""
        ...


class Blobs:
    """Stores and reads content, with limits on concurrent reads and writes."""

    def __init__(self, storage: BlobStorage) -> None:
        self._storage = storage
        self._writing = asyncio.Semaphore(MAX_CONCURRENT)
        self._reading = asyncio.Semaphore(MAX_CONCURRENT)

    async def put(self, content: bytes, *, folder: str) -> BlobRef:
        """Stores content durably under its digest; idempotent.

        Raises:
            BlobStorageUnavailable: If the storage failed or took too long.
        """
        digest = await asyncio.to_thread(lambda: hashlib.sha256(content).digest())
        ref = BlobRef(folder=folder, digest=digest, size_bytes=len(content))
        await self.write(ref.key, content)
        return ref

    async def write(self, key: str, content: bytes, *, limit_s: float = CALL_LIMIT_S) -> None:
        """Stores content durably under a name that nothing else has.

        Raises:
            BlobStorageUnavailable: If the storage failed or took longer than `limit_s` seconds.
        """
        async with self._writing:
            try:
                async with asyncio.timeout(limit_s):
                    await self._storage.write(key, content)
            except OSError as error:  # A TimeoutError is one.
                raise BlobStorageUnavailable("The store's blob storage cannot be written.") from error

    async def get(self, ref: BlobRef) -> bytes:
        """Returns content.

        Raises:
            BlobMissing: If it is missing or damaged.
            BlobStorageUnavailable: If the storage failed or took too long.
        """
        async with self._reading:
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    content = await self._storage.read(ref.key)
            except FileNotFoundError as error:
                raise BlobMissing("A stored payload is missing from the blob storage.", blob=ref.key) from error
            except OSError as error:
                raise BlobStorageUnavailable("The store's blob storage cannot be read.") from error
        if await asyncio.to_thread(lambda: hashlib.sha256(content).digest()) != ref.digest:
            raise BlobMissing("A stored payload is damaged: its digest differs.", blob=ref.key)
        return content

    async def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Returns parts of what `write` stored, each given by its first byte and its size; unchecked.

        Raises:
            BlobMissing: If there is nothing of that name.
            BlobStorageUnavailable: If the storage failed or took too long.
        """
        async with self._reading:
            try:
                async with asyncio.timeout(SEGMENT_LIMIT_S):
                    return await self._storage.read_ranges(key, ranges)
            except FileNotFoundError as error:
                raise BlobMissing("A segment of spans is missing from the blob storage.", blob=key) from error
            except OSError as error:
                raise BlobStorageUnavailable("The store's blob storage cannot be read.") from error

    async def remove(self, refs: Sequence[BlobRef]) -> None:
        """Removes content that no row references; raises as `remove_keys`."""
        await self.remove_keys({ref.key for ref in refs})

    async def remove_keys(self, keys: Iterable[str]) -> None:
        """Removes names, and ignores missing ones.

        Raises:
            BlobStorageUnavailable: If the storage failed or took too long.
        """
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                await self._storage.remove(sorted(keys))
        except OSError as error:
            raise BlobStorageUnavailable("The store's blob storage cannot be written.") from error

    async def remove_folder(self, folder: str) -> None:
        """Removes everything in a folder; the caller sets the timeout.

        Raises:
            BlobStorageUnavailable: If the storage failed.
        """
        try:
            await self._storage.remove_folder(folder)
        except OSError as error:
            raise BlobStorageUnavailable("The store's blob storage cannot be written.") from error


class FolderStorage:
    """A local folder, or one that all replicas mount. Content is synced to disk before it gets its name."""

    def __init__(self, root: Path) -> None:
        """Creates the storage; the first write creates the folder."""
        self._root = root

    async def write(self, key: str, content: bytes) -> None:
        """Stores content durably; replaces existing content."""
        await asyncio.to_thread(self._write, self._root / key, content)

    async def read(self, key: str) -> bytes:
        """Returns the stored content."""
        return await asyncio.to_thread((self._root / key).read_bytes)

    async def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Returns parts of the stored content."""

        def read() -> list[bytes]:
            with (self._root / key).open("rb", buffering=0) as file:
                return [os.pread(file.fileno(), size, start) for start, size in ranges]

        return await asyncio.to_thread(read)

    async def remove(self, keys: Sequence[str]) -> None:
        """Removes names, ignoring missing ones, and folders that become empty."""
        await asyncio.to_thread(self._remove, [self._root / key for key in keys])

    async def remove_folder(self, folder: str) -> None:
        """Removes a folder and everything in it."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._root / folder)

        await asyncio.to_thread(remove)

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        has_folder = path.parent.is_dir()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{_UNFINISHED}{path.name}-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                Path(temporary).replace(path)
            except OSError:
                Path(temporary).unlink(missing_ok=True)
                raise
        # A name is durable once its folder is synced; the name of a new folder is in its parent.
        for folder in (path.parent, *(() if has_folder else path.parents[1:4])):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @staticmethod
    def _remove(paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            # What writers that were killed have left.
            names = {path.name for path in paths}
            for temporary in folder.glob(f"{_UNFINISHED}*"):
                if temporary.name.removeprefix(_UNFINISHED).rpartition("-")[0] in names:
                    temporary.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()


def open_storage(url: str) -> BlobStorage:
    """Opens the storage that a URL names: `file:///folder`, or `s3://`, `gs://` or `az://` with bucket and prefix.

    Raises:
        StartupError: If the URL is malformed or of another kind, or the required extra is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
            raise StartupError("The blob URL must name a folder of this machine: file:///path/of/the/folder.")
        return FolderStorage(Path(unquote(parts.path)))
    if parts.scheme not in ("s3", "gs", "az") or not parts.netloc:
        raise StartupError("The blob URL must begin with file:///, s3://, gs:// or az://, and name a bucket.")
    try:
        from fulmen_store.spans.object_storage import ObjectStorage
    except ImportError:
        raise StartupError(f'{parts.scheme}:// needs an extra: pip install "fulmen-store[blobs]".') from None
    return ObjectStorage.open(url)
