"""Uploads folders of weights to a deployment and downloads them, across broken connections; see `WeightService`.

Nothing here needs torch. An interrupted transfer is resumed when it is started again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, TypeVar

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.errors import (
    ArgumentInvalid,
    DeadlineExceeded,
    FulmenError,
    InternalError,
    ModelNotFound,
    QuotaExceeded,
    Unavailable,
    UploadDamaged,
    UploadOffsetInvalid,
)
from fulmen.models.files import ModelFile, listed_files, manifest_problems, path_problem, read_manifest
from fulmen.models.peer import Peer, PeerFailure

__all__ = ["Downloaded", "Progress", "TransferFailed", "Uploaded", "download_weights", "places_of", "upload_model"]

CHUNK_BYTES: Final = 2**20
STREAM_BYTES: Final = 256 * 2**20
"""Size of one stream of an upload, after which the service acknowledges what it has received."""
STREAM_TIMEOUT_S: Final = 600.0
# A stream on which nothing moves for so long is given up, and another continues.
STALL_S = 60.0
# What a service needs no longer for: it reads a file once more when it is complete, to compare its SHA-256.
CHECKED_BYTES_PER_S = 50e6
READ_TIMEOUT_S: Final = 1800.0
PATIENCE_S: Final = 120.0
PART: Final = ".part"
_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 10.0
_DAMAGED_TRIES: Final = 3

Progress = Callable[[int, int], None]
"""Called with the bytes that have arrived and their total."""
Result = TypeVar("Result")


class TransferFailed(Exception):
    """Raised when a file does not match its manifest, or the target of a download exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """A model that was uploaded.

    Attributes:
        model: The model.
        left_out: Paths of the folder that were not sent, because they are not model data.
        sent_bytes: Number of bytes sent; the service already had the rest.
    """

    model: pb.Model
    left_out: tuple[str, ...]
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """Weights that were downloaded.

    Attributes:
        source: The downloaded weights, by an immutable name.
        digest: Digest of its manifest.
        size_bytes: Size of all files.
    """

    source: pb.WeightSource
    digest: str
    size_bytes: int


async def upload_model(
    weights: WeightServiceStub,
    folder: Path,
    *,
    project: str = "",
    alias: str = "",
    on_progress: Progress = lambda done, total: None,
    patience_s: float = PATIENCE_S,
) -> Uploaded:
    """Uploads the files of a folder in the format of `transformers` that the service does not have.

    Args:
        weights: the service.
        folder: the folder. Its links to files are followed; hidden names and files that are not model data are left out.
        project: `projects/{project}`; empty for the token's.
        alias: alias of the model; empty for none.
        on_progress: called after each chunk.
        patience_s: time without a byte after which an outage ends the upload, in seconds.

    Raises:
        ArgumentInvalid: if it cannot be a model; lists all problems.
        OSError: if a file cannot be read.
        TransferFailed: if a file changes while it is read.
        FulmenError: the service's last answer, such as ModelExists or QuotaExceeded.
    """
    left_out = (await asyncio.to_thread(listed_files, folder, follow_links=True))[1]
    files = await asyncio.to_thread(read_manifest, folder, follow_links=True)
    if problems := manifest_problems(files):
        raise ArgumentInvalid(f"{folder} cannot be uploaded as a model.", violations=problems)
    upload = _Upload(weights, folder, files, on_progress)
    patience, damaged = _Patience(patience_s), 0
    while True:
        try:
            # It may read the files of which all bytes had arrived.
            begun = await weights.BeginUpload(_begin_request(project, files, alias), timeout=STREAM_TIMEOUT_S)
            upload.begun(begun)
            patience.reached(upload.arrived_bytes)
            if begun.missing:
                await upload.send()
                continue
            answer = await weights.CommitUpload(
                pb.CommitUploadRequest(upload=begun.upload, alias=alias), timeout=STREAM_TIMEOUT_S
            )
            return Uploaded(model=answer.model, left_out=tuple(left_out), sent_bytes=upload.sent_bytes)
        except FulmenError as error:
            if isinstance(error, ModelNotFound):
                # It has expired or was removed: start again.
                error = Unavailable(error.message)
            damaged += isinstance(error, UploadDamaged)
            if damaged == _DAMAGED_TRIES:
                raise TransferFailed(f"{error.message} Is a process writing to {folder}?") from error
            await patience.wait(error)


async def download_weights(
    weights: WeightServiceStub,
    source: pb.WeightSource,
    folder: Path,
    *,
    on_progress: Progress = lambda done, total: None,
    patience_s: float = PATIENCE_S,
    peer: Peer | None = None,
) -> Downloaded:
    """Downloads a model or the weights of a policy version; the folder appears once all files have arrived and were
    verified.

    Files that an interrupted download has left in `{folder}.part` are reused.

    Args:
        weights: the service.
        source: the weights to download.
        folder: the new folder, which must not exist or be empty.
        on_progress: called after each chunk.
        patience_s: time without a byte after which an outage ends the download, in seconds.
        peer: tried first; files that it does not send, or sends damaged, are fetched from the service.

    Raises:
        TransferFailed: if the folder exists and is not empty, or the service sends data that does not match its
            manifest.
        OSError: if a file cannot be written.
        FulmenError: the service's last answer, such as ModelNotFound.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TransferFailed(f"{folder} is not an empty folder: name a new one.")
    patience = _Patience(patience_s)
    found = await _patiently(
        patience, lambda: weights.GetWeights(pb.GetWeightsRequest(source=source), timeout=READ_TIMEOUT_S)
    )
    files = [ModelFile(path=each.path, size_bytes=each.size_bytes, sha256=each.sha256) for each in found.files]
    if outside := next((file.path for file in files if path_problem(file.path)), ""):
        raise TransferFailed(f"The service named a file that is not allowed in a model: {outside!r}.")
    aside = folder.with_name(f"{folder.name}{PART}")
    progress = _Arrived(sum(file.size_bytes for file in files), on_progress)
    download = _Download(weights=weights, source=found.source, progress=progress, patience=patience, peer=peer)
    for file in files:
        place = aside / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        await download.file(file, place)
    await asyncio.to_thread(_appear, aside, folder, {file.path for file in files})
    return Downloaded(source=found.source, digest=found.digest, size_bytes=progress.total_bytes)


def places_of(folder: Path, path: str) -> tuple[Path, ...]:
    """Returns the places of a file of a download: in the final folder, before all files have arrived, and while it
    arrives."""
    aside = folder.with_name(f"{folder.name}{PART}") / path
    return folder / path, aside, aside.with_name(f"{aside.name}{PART}")


class _Upload:
    """The files that an upload still has to send."""

    def __init__(self, weights: WeightServiceStub, folder: Path, files: Sequence[ModelFile], report: Progress) -> None:
        self._weights, self._folder, self._report = weights, folder, report
        self._files = {file.path: file for file in files}
        self._total = sum(file.size_bytes for file in files)
        self._missing: list[pb.FileProgress] = []
        self._name = ""
        self._moving = _Moving()
        self.sent_bytes = self.arrived_bytes = 0

    def begun(self, answer: pb.BeginUploadResponse) -> None:
        """Stores the list of files that the service lacks."""
        self._name, self._missing = answer.upload, [*answer.missing]
        lacking = sum(self._files[each.path].size_bytes - each.received_bytes for each in self._missing)
        self.arrived_bytes = self._total - lacking
        self._report(self.arrived_bytes, self._total)

    async def send(self) -> None:
        """Sends missing bytes, at most `STREAM_BYTES`.

        Raises:
            TransferFailed: if there is nothing to send.
        """
        before = self.sent_bytes
        failed: list[Exception] = []

        async def chunks() -> AsyncIterator[pb.UploadChunksRequest]:
            # grpc would turn an error in here into a cancellation of the caller.
            try:
                async for chunk in self._chunks():
                    yield chunk
            except Exception as error:  # noqa: BLE001  # raised again below
                failed.append(error)

        try:
            async with _Moving() as self._moving:
                await self._weights.UploadChunks(chunks(), timeout=STREAM_TIMEOUT_S)
        finally:
            if failed:
                raise failed[0]
        if self.sent_bytes == before:
            lacking = self._missing[0]
            raise TransferFailed(
                f"{lacking.path} has {self._files[lacking.path].size_bytes} bytes by its manifest, and none to send after "
                f"{lacking.received_bytes}. Is a process writing to {self._folder}?"
            )

    async def _chunks(self) -> AsyncIterator[pb.UploadChunksRequest]:
        left = STREAM_BYTES
        for missing in self._missing:
            with (self._folder / missing.path).open("rb") as file:
                offset = missing.received_bytes
                file.seek(offset)
                while left > 0 and (data := await asyncio.to_thread(file.read, CHUNK_BYTES)):
                    yield pb.UploadChunksRequest(upload=self._name, path=missing.path, offset=offset, data=data)
                    offset += len(data)
                    left -= len(data)
                    self.sent_bytes += len(data)
                    self.arrived_bytes += len(data)
                    size_bytes = self._files[missing.path].size_bytes
                    self._moving.moves(then_checks_bytes=size_bytes if offset == size_bytes else 0)
                    self._report(self.arrived_bytes, self._total)
            if left <= 0:
                return


class _Moving:
    """Ends a stream that has transferred nothing for `STALL_S`.

    Raises:
        Unavailable: if that happens.
    """

    def __init__(self) -> None:
        self._limit = asyncio.timeout(STALL_S)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._limit.__aexit__(*raised)
        except TimeoutError as error:
            raise Unavailable(f"No data was transferred for {STALL_S:.0f} s.") from error

    def moves(self, *, then_checks_bytes: int = 0) -> None:
        """Records a transfer; the service then checks `then_checks_bytes` bytes, during which nothing is
        transferred."""
        until_s = asyncio.get_running_loop().time() + STALL_S + then_checks_bytes / CHECKED_BYTES_PER_S
        # Chunks of the next file are sent ahead while the service still checks the last one.
        if not self._limit.expired() and until_s > (self._limit.when() or 0.0):
            self._limit.reschedule(until_s)


class _Patience:
    """Waits between tries, until nothing has arrived for too long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._best = -1
        self._since_s = time.monotonic()
        self._wait_s = _FIRST_WAIT_S

    def reached(self, arrived_bytes: int) -> None:
        """Records how much has arrived; more than ever before means that the connection works."""
        if arrived_bytes > self._best:
            self._best, self._since_s, self._wait_s = arrived_bytes, time.monotonic(), _FIRST_WAIT_S

    async def wait(self, error: FulmenError) -> None:
        """Waits before the next try.

        Raises:
            FulmenError: the error, if another try cannot succeed.
        """
        if not _may_pass(error) or time.monotonic() - self._since_s > self._limit_s:
            raise error
        await asyncio.sleep(error.retry_after_s or self._wait_s * random.uniform(0.5, 1.0))
        self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)


class _Arrived:
    """Counts the bytes of a download."""

    def __init__(self, total_bytes: int, report: Progress) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._report = report

    def add(self, size_bytes: int) -> None:
        """Counts more bytes; fewer after a file that was damaged."""
        self.done_bytes += size_bytes
        self._report(self.done_bytes, self.total_bytes)


def _may_pass(error: FulmenError) -> bool:
    """Returns whether the same transfer may continue after an error."""
    if isinstance(error, QuotaExceeded):
        return bool(error.retry_after_s)  # of what is full there is no time
    if isinstance(error, InternalError):
        return not error.metadata  # of gRPC, which forgets the answer of a server that ends a call early
    return isinstance(error, Unavailable | DeadlineExceeded | UploadOffsetInvalid | UploadDamaged)


async def _patiently(patience: _Patience, call: Callable[[], Awaitable[Result]]) -> Result:
    while True:
        try:
            return await call()
        except FulmenError as error:
            await patience.wait(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Download:
    """The sources of the files of a download."""

    weights: WeightServiceStub
    source: pb.WeightSource
    progress: _Arrived
    patience: _Patience
    peer: Peer | None

    async def file(self, file: ModelFile, place: Path) -> None:
        """Downloads a file, or the rest of it."""
        if place.exists() and await asyncio.to_thread(_is_right, place, file):
            self.progress.add(file.size_bytes)
            return
        part = place.with_name(f"{place.name}{PART}")
        for _ in range(_DAMAGED_TRIES):
            arrived = min(part.stat().st_size, file.size_bytes) if part.exists() else 0
            self.progress.add(arrived)
            with part.open("r+b" if arrived else "wb") as target:
                target.truncate(arrived)
                target.seek(arrived)
                from_peer = await self._from_peer(file, target)
                while target.tell() < file.size_bytes:
                    await self._from_service(file, target)
            if await asyncio.to_thread(_is_right, part, file):
                part.rename(place)
                return
            if self.peer is not None and from_peer:
                self.peer.fail(PeerFailure.WRONG)
            part.unlink()
            self.progress.add(-file.size_bytes)
        raise TransferFailed(f"{file.path} does not have the SHA-256 of the manifest, after {_DAMAGED_TRIES} tries.")

    async def _from_peer(self, file: ModelFile, target: BinaryIO) -> int:
        if self.peer is None or target.tell() == file.size_bytes:
            return 0
        return await self.peer.receive(self._request(file, target), partial(self._write, target))

    async def _from_service(self, file: ModelFile, target: BinaryIO) -> None:
        self.patience.reached(self.progress.done_bytes)
        before = target.tell()
        try:
            async with _Moving() as moving:
                async for chunk in self.weights.DownloadChunks(self._request(file, target), timeout=STREAM_TIMEOUT_S):
                    if target.tell() + len(chunk.data) > file.size_bytes:
                        raise TransferFailed(f"The service sent more bytes of {file.path} than its size.")
                    await self._write(target, chunk.data)
                    moving.moves()
            if target.tell() == before:
                raise TransferFailed(f"The service ended {file.path} before its full size.")
        except FulmenError as error:
            await self.patience.wait(error)

    def _request(self, file: ModelFile, target: BinaryIO) -> pb.DownloadChunksRequest:
        offset = target.tell()
        return pb.DownloadChunksRequest(
            source=self.source, path=file.path, offset=offset, size_bytes=file.size_bytes - offset
        )

    async def _write(self, target: BinaryIO, data: bytes) -> None:
        await asyncio.to_thread(_written, target, data)
        self.progress.add(len(data))


def _written(target: BinaryIO, data: bytes) -> None:
    target.write(data)
    target.flush()  # others may read what has arrived


def _begin_request(project: str, files: Sequence[ModelFile], alias: str) -> pb.BeginUploadRequest:
    listed = [pb.WeightFile(path=each.path, size_bytes=each.size_bytes, sha256=each.sha256) for each in files]
    return pb.BeginUploadRequest(project=project, files=listed, alias=alias)


def _is_right(path: Path, file: ModelFile) -> bool:
    with path.open("rb") as content:
        if os.fstat(content.fileno()).st_size != file.size_bytes:
            return False
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256


def _appear(aside: Path, folder: Path, files: Set[str]) -> None:
    """Renames a complete folder, without files that other downloads have left in it."""
    for path in sorted(aside.rglob("*"), reverse=True):
        if path.is_dir():
            with suppress(OSError):
                path.rmdir()
        elif path.relative_to(aside).as_posix() not in files:
            path.unlink()
    with suppress(FileNotFoundError):
        folder.rmdir()
    aside.rename(folder)
