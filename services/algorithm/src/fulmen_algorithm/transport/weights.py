"""`fulmen.algorithm.v1.WeightService`."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceServicer
from fulmen.errors import (
    ArgumentInvalid,
    DeadlineExceeded,
    Draining,
    ModelInUse,
    ModelNotFound,
    ResourceNotFound,
    RunStorageUnavailable,
    UploadDamaged,
    UploadOffsetInvalid,
    Violation,
)
from fulmen.models.files import ModelFile, manifest_digest, path_problem, read_manifest
from fulmen_algorithm.models.file_reader import FileReader
from fulmen_algorithm.models.file_writer import FileWriter
from fulmen_algorithm.models.model_store import ModelStore, StoredModel
from fulmen_algorithm.models.names import PROJECT, ModelName, unknown
from fulmen_algorithm.models.transfers import CHUNK_BYTES, Transfers
from fulmen_algorithm.models.uploads import Uploads
from fulmen_algorithm.models.version_weights import VersionWeights, WeightForm
from fulmen_algorithm.transport.pages import page
from fulmen_service_kit.security.auth import current_caller, require_project

UsedBy = Callable[[StoredModel], str]
"""Returns the run that has not ended, or the trainer, that starts from a model; empty if there is none."""

UPLOAD: Final = "upload"
DOWNLOAD: Final = "download"
KEPT_MANIFESTS: Final = 64

IDLE_TIMEOUT_S: Final = 300.0
"""Time for which an open upload may send nothing; until it ends it counts among the transfers of its project."""


class WeightServicer(WeightServiceServicer):
    """Decodes, calls once, encodes."""

    def __init__(
        self, *, models: ModelStore, uploads: Uploads, versions: VersionWeights, transfers: Transfers, used_by: UsedBy
    ) -> None:
        self._models = models
        self._uploads = uploads
        self._versions = versions
        self._transfers = transfers
        self._used_by = used_by
        self._manifests = _Manifests(transfers)
        self._senders: dict[tuple[ModelName, str], object] = {}
        self._drains = False

    def drain(self) -> None:
        """Ends the open transfers at their next chunk; their callers continue them elsewhere."""
        self._drains = True

    async def BeginUpload(
        self, request: pb.BeginUploadRequest, context: grpc.aio.ServicerContext
    ) -> pb.BeginUploadResponse:
        """Begins or continues an upload."""
        project = _project(request.project)
        files = [ModelFile(path=each.path, size_bytes=each.size_bytes, sha256=each.sha256) for each in request.files]
        begun = await self._transfers.blocking(self._uploads.begin, project, files, request.alias)
        if begun.unfinished:
            # There is nothing left to send of them, so no stream will complete them. Reads files, as a transfer does.
            with self._transfers.begin(current_caller()), self._counting_damaged():
                await self._transfers.reading(self._uploads.complete, begun.name, begun.unfinished)
            begun = await self._transfers.blocking(self._uploads.begin, project, files, request.alias)
        return pb.BeginUploadResponse(
            upload=str(begun.name),
            missing=[pb.FileProgress(path=file.path, received_bytes=arrived) for file, arrived in begun.missing],
            model=None if begun.model is None else _model(begun.model),
            expire_time=_timestamp(begun.expires_s) if begun.model is None else None,
        )

    async def UploadChunks(
        self, requests: AsyncIterator[pb.UploadChunksRequest], context: grpc.aio.ServicerContext
    ) -> pb.UploadChunksResponse:
        """Receives chunks of files."""
        received, sent = 0, _Sent(self._senders)
        name: ModelName | None = None
        try:
            with self._transfers.begin(current_caller()) as transfer, self._counting_damaged():
                while (message := await next_chunk(requests)) is not None:
                    self._refuse_if_draining()
                    if name is None and not message.upload:
                        raise _invalid("upload", "is required in the first message")
                    name = name or _own(message.upload, is_upload=True)
                    if problems := _chunk_problems(message, str(name)):
                        raise ArgumentInvalid("The chunk is malformed.", violations=problems)
                    if not sent.is_of(message.path):
                        await self._transfers.reading(sent.finish)
                        writer = await self._transfers.blocking(self._uploads.writer, name, message.path)
                        sent.open(name, message.path, writer)
                    await self._transfers.blocking(sent.write, message.offset, message.data)
                    received += len(message.data)
                    await transfer.moved(len(message.data), UPLOAD)
                await self._transfers.reading(sent.finish)
        finally:
            self._transfers.later(sent.close)
        return pb.UploadChunksResponse(received_bytes=received)

    async def CommitUpload(
        self, request: pb.CommitUploadRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitUploadResponse:
        """Makes a complete upload a model."""
        name = _own(request.upload, is_upload=True)
        model = await self._transfers.blocking(self._uploads.commit, name, request.alias)
        self._transfers.happened("committed")
        return pb.CommitUploadResponse(model=_model(model))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """Lists the models of a project."""
        found = await self._transfers.blocking(self._models.listed, _project(request.project))
        listed, token = page(found, request.page_size, request.page_token)
        return pb.ListModelsResponse(models=[_model(each) for each in listed], next_page_token=token)

    async def DeleteModel(
        self, request: pb.DeleteModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteModelResponse:
        """Deletes a model, or an upload."""
        name = _own(request.name)
        if name.is_upload:
            await self._transfers.blocking(self._uploads.delete, name)
            return pb.DeleteModelResponse()
        try:
            model = await self._transfers.blocking(self._models.find, name)
        except ModelNotFound:
            return pb.DeleteModelResponse()
        # On the event loop up to its new name: no run begins meanwhile.
        if run := self._used_by(model):
            raise ModelInUse(
                f"{run} starts from the model and has not ended, or still needs it.", model=model.name, training_run=run
            )
        self._models.delete(model)
        self._transfers.happened("deleted")
        await self._transfers.blocking(self._models.remove_deleted)
        return pb.DeleteModelResponse()

    async def GetWeights(
        self, request: pb.GetWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetWeightsResponse:
        """Returns the manifest of a model or a version."""
        found = await self._found(request.source)
        files = found.files or await self._manifests.of(found.folder)
        return pb.GetWeightsResponse(
            source=found.source,
            digest=manifest_digest(files),
            files=[pb.WeightFile(path=each.path, size_bytes=each.size_bytes, sha256=each.sha256) for each in files],
        )

    async def DownloadChunks(
        self, request: pb.DownloadChunksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DownloadChunksResponse]:
        """Sends a range of a file."""
        with self._transfers.begin(current_caller()) as transfer:
            found = await self._found(request.source)
            reading = await self._transfers.blocking(_reader, found.folder, request)
            try:
                while data := await self._transfers.blocking(reading.next, CHUNK_BYTES):
                    self._refuse_if_draining()
                    await transfer.moved(len(data), DOWNLOAD)
                    yield pb.DownloadChunksResponse(data=data)
            finally:
                self._transfers.later(reading.close)

    async def _found(self, source: pb.WeightSource) -> "_Found":
        own_run = current_caller().training_run  # an engine's
        match source.WhichOneof("source"):
            case "model" if own_run:
                raise unknown(source.model)
            case "model":
                name = _own(source.model)
                if name.is_upload:
                    raise unknown(name)
                model, folder = await self._transfers.blocking(self._models.use, name)
                return _Found(pb.WeightSource(model=str(model.name)), folder, model.files)
            case "policy_version":
                project = _project(source.project)
                if source.form not in pb.WeightForm.values():
                    raise _invalid("source.form", f"{source.form} is unknown to this service")
                form = WeightForm(pb.WeightForm.Name(source.form).removeprefix("WEIGHT_FORM_"))
                version = await self._versions.find(project, source.policy_version, form)
                if own_run not in ("", version.training_run):
                    raise ResourceNotFound("The version does not belong to the token's run.")
                pinned = pb.WeightSource(policy_version=version.name, project=project, form=source.form)
                return _Found(pinned, version.folder)
            case _:
                raise _invalid("source", "must name a model or a policy version")

    @contextmanager
    def _counting_damaged(self) -> Iterator[None]:
        try:
            yield
        except UploadDamaged:
            self._transfers.happened("damaged")
            raise

    def _refuse_if_draining(self) -> None:
        if self._drains:
            raise Draining("The service is shutting down.")


@dataclass(frozen=True, slots=True)
class _Found:
    """Weights: their pinned source, their folder, and their manifest if it is known."""

    source: pb.WeightSource
    folder: Path
    files: tuple[ModelFile, ...] = ()


class _Sent:
    """The file that a stream of chunks sends. The last stream that begins to send a file is the one that may."""

    def __init__(self, senders: dict[tuple[ModelName, str], object]) -> None:
        self._senders = senders
        self._key: tuple[ModelName, str] | None = None
        self._writer: FileWriter | None = None

    def is_of(self, path: str) -> bool:
        """Returns whether the last chunk was of this file."""
        return self._key is not None and self._key[1] == path

    def open(self, name: ModelName, path: str, writer: FileWriter) -> None:
        """Starts another file."""
        self.close()
        self._key, self._writer = (name, path), writer
        self._senders[self._key] = self

    def write(self, offset: int, data: bytes) -> None:
        """Writes a chunk; see `FileWriter.write`."""
        assert self._key is not None
        assert self._writer is not None
        if self._senders.get(self._key) is not self:
            path, arrived = self._key[1], self._writer.received
            raise UploadOffsetInvalid(f"Another stream is sending {path}.", path=path, received_bytes=arrived)
        self._writer.write(offset, data)

    def finish(self) -> None:
        """Makes durable what was written; see `FileWriter.finish`."""
        if self._writer is not None:
            self._writer.finish()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None and self._key is not None:
            self._writer.close()
            if self._senders.get(self._key) is self:
                del self._senders[self._key]


def _reader(folder: Path, request: pb.DownloadChunksRequest) -> FileReader:
    """Opens the range of a request. Blocks."""
    if path_problem(request.path):
        raise _invalid("path", "is not a file of the model")
    try:
        reader = FileReader(folder / request.path)
    except OSError as error:
        raise _invalid("path", "is not a file of the model") from error
    size_bytes = reader.size_bytes
    end = request.offset + (request.size_bytes or max(size_bytes - request.offset, 0))
    if not 0 <= request.offset <= end <= size_bytes:
        reader.close()
        raise _invalid("offset", f"the range is not in the file, which has {size_bytes} bytes")
    reader.go(request.offset, end)
    return reader


class _Manifests:
    """Manifests of folders that never change, each read once."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._known: OrderedDict[tuple[Path, int], asyncio.Task[list[ModelFile]]] = OrderedDict()

    async def of(self, folder: Path) -> list[ModelFile]:
        """Reads the files of a folder, which takes about a second per gigabyte the first time.

        Raises:
            ModelNotFound: if it no longer exists.
        """
        key = None
        try:
            key = (folder, folder.stat().st_ino)
            if key not in self._known:
                self._known[key] = asyncio.create_task(self._transfers.reading(read_manifest, folder))
                while len(self._known) > KEPT_MANIFESTS:
                    self._known.popitem(last=False)
            # Callers that leave do not stop it for others.
            return await asyncio.shield(self._known[key])
        except (FileNotFoundError, RunStorageUnavailable) as error:
            if key is not None:
                self._known.pop(key, None)
            if isinstance(error, RunStorageUnavailable):
                raise
            raise ModelNotFound("The weights were removed meanwhile.") from None


def _project(name: str) -> str:
    """Returns the project of a request, in which the caller may act."""
    project = require_project(name)
    if not PROJECT.fullmatch(project):
        raise _invalid("project", "must be projects/ and 1 to 63 of [a-z0-9-]")
    return project


def _own(text: str, *, is_upload: bool = False) -> ModelName:
    """Reads a name in a project of the caller; another project's is as if it did not exist."""
    name = ModelName.parse(text)
    if not current_caller().may_access(name.project) or (is_upload and not name.is_upload):
        raise unknown(text)
    return name


async def next_chunk(requests: AsyncIterator[pb.UploadChunksRequest]) -> pb.UploadChunksRequest | None:
    """Returns the next message of an upload; None at its end.

    Raises:
        DeadlineExceeded: if nothing is sent for `IDLE_TIMEOUT_S`.
    """
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            return await anext(aiter(requests), None)
    except TimeoutError:
        raise DeadlineExceeded(f"No chunk arrived for {IDLE_TIMEOUT_S:g} s.") from None


def _chunk_problems(message: pb.UploadChunksRequest, upload: str) -> list[Violation]:
    found = []
    if message.upload not in ("", upload):
        found.append(Violation(field="upload", description="must be the same in all messages of a stream"))
    if not 1 <= len(message.data) <= CHUNK_BYTES:
        found.append(Violation(field="data", description=f"has {len(message.data)} bytes; must be 1 to {CHUNK_BYTES}"))
    return found


def _invalid(field: str, description: str) -> ArgumentInvalid:
    return ArgumentInvalid("The request is malformed.", violations=[Violation(field=field, description=description)])


def _model(model: StoredModel) -> pb.Model:
    return pb.Model(
        name=str(model.name),
        aliases=model.aliases,
        size_bytes=model.size_bytes,
        file_count=len(model.files),
        create_time=_timestamp(model.created_s),
        use_time=_timestamp(model.used_s),
    )


def _timestamp(unix_s: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(round(unix_s * 1e9))
    return stamp
