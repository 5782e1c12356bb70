"""A transfer on which nothing moves is given up, and goes on with another stream."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import (
    WeightServiceServicer,
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)
from fulmen.models import transfer
from fulmen.models.transfer import download_weights, upload_model
from fulmen.rpc.channel import open_channel
from tests.support.algorithm.model_folders import model_folder

CONTENT = bytes(1000)


class Stalling(WeightServiceServicer):
    """A service whose first stream of each kind never ends."""

    def __init__(self, *, checks_for_s: float = 0.0) -> None:
        """With `checks_for_s` no stream stands still, but the answer comes so long after the last chunk."""
        self._checks_for_s = checks_for_s
        self.streams = 0
        self.received = b""

    async def BeginUpload(self, request: pb.BeginUploadRequest, context: Any) -> pb.BeginUploadResponse:
        done = self.streams > (0 if self._checks_for_s else 1)
        missing = [] if done else [pb.FileProgress(path=each.path) for each in request.files]
        return pb.BeginUploadResponse(upload="projects/a/uploads/x", missing=missing)

    async def UploadChunks(self, requests: AsyncIterator[pb.UploadChunksRequest], context: Any) -> Any:
        await self._stall()
        async for chunk in requests:
            self.received += chunk.data
        await asyncio.sleep(self._checks_for_s)
        return pb.UploadChunksResponse()

    async def CommitUpload(self, request: pb.CommitUploadRequest, context: Any) -> pb.CommitUploadResponse:
        return pb.CommitUploadResponse(model=pb.Model(name="projects/a/models/x"))

    async def GetWeights(self, request: pb.GetWeightsRequest, context: Any) -> pb.GetWeightsResponse:
        file = pb.WeightFile(path="x.json", size_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
        return pb.GetWeightsResponse(source=request.source, files=[file])

    async def DownloadChunks(self, request: pb.DownloadChunksRequest, context: Any) -> AsyncIterator[Any]:
        await self._stall()
        yield pb.DownloadChunksResponse(data=CONTENT[request.offset :])

    async def _stall(self) -> None:
        self.streams += 1
        if self.streams == 1 and not self._checks_for_s:
            await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALL_S", 0.3)


@asynccontextmanager
async def served(service: Stalling) -> AsyncIterator[WeightServiceStub]:
    server = grpc.aio.server()
    add_WeightServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield WeightServiceStub(channel)
    await server.stop(None)


async def test_an_upload_goes_on_after_a_stream_that_stands_still(tmp_path: Path) -> None:
    service = Stalling()
    async with served(service) as weights:
        done = await upload_model(weights, model_folder(tmp_path / "tiny", size_bytes=100))

    assert done.model.name == "projects/a/models/x"
    assert service.streams == 2


async def test_an_upload_waits_for_a_service_that_checks_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHECKED_BYTES_PER_S", 10.0)
    service = Stalling(checks_for_s=1.0)
    async with served(service) as weights:
        await upload_model(weights, model_folder(tmp_path / "tiny", size_bytes=100))

    assert service.streams == 1


async def test_a_download_goes_on_after_a_stream_that_stands_still(tmp_path: Path) -> None:
    service = Stalling()
    async with served(service) as weights:
        await download_weights(weights, pb.WeightSource(model="x"), tmp_path / "new")

    assert (tmp_path / "new/x.json").read_bytes() == CONTENT
    assert service.streams == 2
