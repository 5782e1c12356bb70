"""The files of runs in an object store (S3, Google Cloud Storage, Azure); requires the extra `fulmen-algorithm[objects]`.

Each run's folder is a local copy. Credentials, region and endpoint come from the environment variables of each provider's
own tools (`AWS_ACCESS_KEY_ID`, `AWS_REGION`, `AWS_ENDPOINT_URL` and so on).

Invariants: a checkpoint is in the store only if its manifest is, which is uploaded last; names hold epochs, so that an
earlier owner's upload replaces nothing of a later one.
"""

import asyncio
import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fulmen_algorithm.persistence.checkpoints import MANIFEST, CheckpointStore, epoch_of
from fulmen_algorithm.training.files import StorageFailed, appear
from fulmen_service_kit.errors import StartupError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

RUNS: Final = "runs"
CHECKPOINTS: Final = "checkpoints"
COMPLETE: Final = "complete"
"""Name of the object that is uploaded last for a folder of weights."""
KEYS_PER_REMOVAL: Final = 500
PIECE_BYTES: Final = 16 * 2**20
TRANSFER_LIMIT_S: Final = 3600.0
RETRY_LIMIT: Final = timedelta(seconds=20)
_JOURNAL: Final = re.compile(r"journal-(\d{8})/")


class ObjectMirror:
    """Copies folders of runs to and from one bucket and prefix. Every method raises StorageFailed if the store fails."""

    def __init__(self, store: "ObjectStore") -> None:
        self._store = store

    @classmethod
    def open(cls, url: str) -> "ObjectMirror":
        """Opens a bucket without sending a request.

        Raises:
            StartupError: if the package is missing, or the URL or the environment is invalid.
        """
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            raise StartupError(
                "run_storage in an object store needs `pip install 'fulmen-algorithm[objects]'`."
            ) from None
        try:
            return cls(from_url(url, retry_config={"max_retries": 3, "retry_timeout": RETRY_LIMIT}))
        except (BaseError, ValueError):
            raise StartupError(
                "The URL of run_storage, or its configuration in the environment, is not usable."
            ) from None

    async def pull_journal(self, folder: Path, *, below: int | None = None) -> int:
        """Downloads the newest journal, optionally below an epoch, unless it exists; returns its epoch, 0 for none."""
        keys = await self._keys(folder, "")
        epochs = {int(match[1]) for key in keys if (match := _JOURNAL.match(key))}
        epoch = max((each for each in epochs if below is None or each < below), default=0)
        name = f"journal-{epoch:08d}"
        if epoch and not (folder / name / "run.json").exists():
            await self._download(folder, name, [key for key in keys if key.startswith(f"{name}/")])
        return epoch

    async def pull(self, folder: Path, *, below: int) -> None:
        """Downloads the newest journal below an epoch and its checkpoints; removes copies of other checkpoints."""
        epoch = await self.pull_journal(folder, below=below)
        if not epoch:
            return
        adopted = folder / f"journal-{epoch:08d}" / "adopted.json"
        admitted = set(json.loads(adopted.read_bytes())) if adopted.exists() else set()
        keys = await self._keys(folder, CHECKPOINTS)
        names = {key.split("/")[1] for key in keys if key.endswith(f"/{MANIFEST}")}
        wanted = {name for name in names if name in admitted or epoch_of(name) == epoch}
        for name in sorted(wanted, reverse=True):
            if not (folder / CHECKPOINTS / name).exists():
                place = f"{CHECKPOINTS}/{name}"
                await self._download(folder, place, [key for key in keys if key.startswith(f"{place}/")])
        local = folder / CHECKPOINTS
        for path in [*local.iterdir()] if local.is_dir() else ():
            written_in = epoch_of(path.name)
            if written_in is not None and written_in < epoch and path.name not in wanted:
                await asyncio.to_thread(shutil.rmtree, path)

    async def push(self, folder: Path, checkpoints: CheckpointStore, *, epoch: int) -> None:
        """Uploads the journal, then complete checkpoints that the store lacks; removes those that are kept no longer."""
        await self.push_journal(folder, epoch=epoch)
        keys = await self._keys(folder, CHECKPOINTS)
        stored = {key.split("/")[1] for key in keys if key.endswith(f"/{MANIFEST}")}
        local = {each.path.name: each.path for each in await asyncio.to_thread(checkpoints.listed)}
        for name in sorted(local.keys() - stored):
            files = [path for path in local[name].rglob("*") if path.is_file() and path.name != MANIFEST]
            await self._upload(folder, [*files, local[name] / MANIFEST])
        kept = {*local}
        old = [key for key in keys if (name := key.split("/")[1]) not in kept and (epoch_of(name) or 0) <= epoch]
        # Manifests first: a checkpoint that loses a file is none.
        await self._remove(folder, sorted(old, key=lambda key: not key.endswith(MANIFEST)))

    async def push_journal(self, folder: Path, *, epoch: int) -> None:
        """Uploads a journal."""
        journal = folder / f"journal-{epoch:08d}"
        await self._upload(folder, [path for path in sorted(journal.iterdir()) if not path.name.startswith(".")])

    async def push_folder(self, folder: Path, path: Path) -> None:
        """Uploads a folder of weights, which never changes, unless it exists."""
        if f"{path.relative_to(folder)}/{COMPLETE}" in await self._keys(folder, str(path.relative_to(folder))):
            return
        await self._upload(folder, [each for each in path.rglob("*") if each.is_file()])
        await self._put(f"{self._prefix(folder)}/{path.relative_to(folder)}/{COMPLETE}", b"")

    async def fetch(self, folder: Path, path: Path) -> None:
        """Downloads a folder of weights; does nothing if the store does not have it."""
        place = str(path.relative_to(folder))
        keys = await self._keys(folder, place)
        if f"{place}/{COMPLETE}" in keys:
            await self._download(folder, place, [key for key in keys if not key.endswith(f"/{COMPLETE}")])

    async def remove_folders(self, folder: Path, paths: Iterable[Path]) -> None:
        """Removes folders of weights."""
        for path in paths:
            keys = await self._keys(folder, str(path.relative_to(folder)))
            # The marker first: a folder that loses a file is none.
            await self._remove(folder, sorted(keys, key=lambda key: not key.endswith(f"/{COMPLETE}")))

    def _prefix(self, folder: Path) -> str:
        return f"{RUNS}/{folder.parent.name}/{folder.name}"

    async def _keys(self, folder: Path, place: str) -> list[str]:
        """Lists the objects of a run below a folder, by their path in the run's folder."""
        import obstore

        prefix, found = self._prefix(folder), []
        with _as_os_errors():
            async with asyncio.timeout(TRANSFER_LIMIT_S):
                async for page in obstore.list(self._store, prefix=f"{prefix}/{place}".rstrip("/")):
                    found += [entry["path"].removeprefix(f"{prefix}/") for entry in page]
        return found

    async def _upload(self, folder: Path, files: Collection[Path]) -> None:
        for path in files:
            await self._put(f"{self._prefix(folder)}/{path.relative_to(folder)}", path)

    async def _put(self, key: str, content: Path | bytes) -> None:
        import obstore

        with _as_os_errors():
            async with asyncio.timeout(TRANSFER_LIMIT_S):
                await obstore.put_async(self._store, key, content)

    async def _remove(self, folder: Path, keys: Collection[str]) -> None:
        import obstore

        named = [f"{self._prefix(folder)}/{key}" for key in keys]
        for start in range(0, len(named), KEYS_PER_REMOVAL):
            with _as_os_errors():
                await obstore.delete_async(self._store, named[start : start + KEYS_PER_REMOVAL])

    async def _download(self, folder: Path, place: str, keys: Collection[str]) -> None:
        """Downloads a folder, which appears once it is complete."""
        target = folder / place
        aside = target.with_name(f".downloading-{target.name}")
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
        for key in keys:
            path = aside / key.removeprefix(f"{place}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            await self._get(f"{self._prefix(folder)}/{key}", path)
        aside.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
        appear(aside, target)

    async def _get(self, key: str, path: Path) -> None:
        import obstore

        with _as_os_errors():
            # In pieces: a request has a timeout, and a file of weights may take longer.
            size = (await obstore.head_async(self._store, key))["size"]
            with path.open("wb") as file:
                for start in range(0, size, PIECE_BYTES):
                    length = min(PIECE_BYTES, size - start)
                    piece = await obstore.get_range_async(self._store, key, start=start, length=length)
                    await asyncio.to_thread(file.write, piece)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, TimeoutError) as error:
        raise StorageFailed("the object store failed") from error
