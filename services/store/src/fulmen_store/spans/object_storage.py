"""Blobs in an object store (S3, Google Cloud Storage, Azure); requires the extra `fulmen-store[blobs]`.

Credentials, region and endpoint come from the environment variables of each provider's own tools
(`AWS_ACCESS_KEY_ID`, `AWS_REGION`, `AWS_ENDPOINT_URL` and so on).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore, from_url

from fulmen_service_kit.errors import StartupError

__all__ = ["ObjectStorage"]

KEYS_PER_REMOVAL: Final = 500
# Ranges this close together are read with one request.
NEAR_BYTES: Final = 64 * 1024


class ObjectStorage:
    """Implements `BlobStorage` over one bucket and prefix. An object is durable when its upload is acknowledged."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @classmethod
    def open(cls, url: str) -> ObjectStorage:
        """Opens a bucket without sending a request.

        Raises:
            StartupError: If the URL or the environment is invalid.
        """
        try:
            return cls(from_url(url))
        except (BaseError, ValueError):
            raise StartupError("The blob URL, or its configuration in the environment, is not usable.") from None

    async def write(self, key: str, content: bytes) -> None:
        """Stores content durably; replaces existing content."""
        with _as_os_errors():
            await obstore.put_async(self._store, key, content, use_multipart=False)

    async def read(self, key: str) -> bytes:
        """Returns the stored content."""
        with _as_os_errors():
            found = await obstore.get_async(self._store, key)
            return bytes(await found.bytes_async())

    async def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Returns parts of the stored content; neighbours come with one request."""
        starts, lengths = zip(*ranges, strict=True)
        with _as_os_errors():
            try:
                found = await obstore.get_ranges_async(
                    self._store, key, starts=starts, lengths=lengths, coalesce=NEAR_BYTES
                )
            except BaseError:
                # Stores answer in several ways that an object ends before the range.
                stored = await obstore.head_async(self._store, key)
                if stored["size"] >= max(start + length for start, length in ranges):
                    raise
                return [b""] * len(ranges)
        return [bytes(part) for part in found]

    async def remove(self, keys: Sequence[str]) -> None:
        """Removes names; ignores missing ones."""
        for start in range(0, len(keys), KEYS_PER_REMOVAL):
            with _as_os_errors():
                await obstore.delete_async(self._store, list(keys[start : start + KEYS_PER_REMOVAL]))

    async def remove_folder(self, folder: str) -> None:
        """Removes all names that begin with the folder."""
        with _as_os_errors():
            async for page in obstore.list(self._store, prefix=folder, chunk_size=KEYS_PER_REMOVAL):
                await obstore.delete_async(self._store, [entry["path"] for entry in page])


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise FileNotFoundError("the object does not exist") from error
    except BaseError as error:
        raise OSError("the object store failed") from error
