"""Callers that never read what they asked for hold nothing but what waits for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.errors import DeadlineExceeded, QuotaExceeded
from fulmen.models.transfer import download_weights, upload_model
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import rollout_service_pb2
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.algorithm.model_folders import content_of, model_folder
from tests.support.service_kit.key_store import KeyService, serving_keys
from tests.support.service_kit.processes import ServiceProcess, serving_process
from tests.support.service_kit.raw_http2 import raw_http2
from tests.support.store.running import create_project, running_store

KEY = "k" * 32
MIB = 2**20
MAX_TRANSFERS = 3
WAIT_S = 60.0


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """Yields an algorithm service that waits a second for a caller to read."""
    async with serving_keys(KeyService(KEY)) as store:
        settings = {
            "token": TokenSigner(KEY).issue(Role.SERVICE, subject="algorithm", ttl_s=3600),
            "port": 0,
            "metrics_port": 0,
            "state_dir": tmp_path / "state",
            "store_target": store,
            "warm_start": "false",
            "max_transfers": MAX_TRANSFERS,
            "stream_write_timeout_s": 1,
        }
        async with serving_process("fulmen_algorithm", settings) as process:
            yield process


def open_models(pid: int) -> list[str]:
    """Returns the files of models that a process has open."""
    # A file may be closed meanwhile.
    links = [os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.endswith(".safetensors")]


async def test_a_download_that_nobody_reads_gives_its_slot_and_its_file_back(
    service: ServiceProcess, tmp_path: Path
) -> None:
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="x", ttl_s=600, project="projects/a")
    # More than gRPC's windows, which grow, ever hold for a caller that reads nothing.
    folder = model_folder(tmp_path / "large", size_bytes=64 * MIB)
    async with open_channel(f"127.0.0.1:{service.port}", token=token) as channel, asyncio.timeout(WAIT_S):
        weights = WeightServiceStub(channel)
        model = (await upload_model(weights, folder)).model.name
        source = pb.WeightSource(model=model)
        (large,) = (path.name for path in folder.glob("*.safetensors"))
        request = pb.DownloadChunksRequest(source=source, path=large)
        unread = [weights.DownloadChunks(request) for _ in range(MAX_TRANSFERS)]
        for stream in unread:
            assert len((await stream.read()).data) == MIB
        with pytest.raises(QuotaExceeded, match="max_transfers"):
            await weights.DownloadChunks(request).read()
        while open_models(service.pid):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.05)
        await download_weights(weights, source, tmp_path / "back")
        assert content_of(tmp_path / "back") == content_of(folder)
        with pytest.raises(DeadlineExceeded, match="read no message"):
            _ = [message async for message in unread[0]]


async def test_answers_that_nobody_reads_count_among_the_open_calls_of_their_project(database_url: str) -> None:
    async with running_store(database_url, project_max_calls=4) as store, asyncio.timeout(WAIT_S):
        project = "projects/team-a"
        await create_project(await store.stubs(), project)
        client = await store.stubs(role=Role.CLIENT, project=project)
        authorization = f"Bearer {store.token(Role.CLIENT, project=project)}"
        request = rollout_service_pb2.ListRolloutsRequest(project=project)
        rpc = "/fulmen.store.v1.RolloutService/ListRollouts"
        async with raw_http2(store.port) as silent:
            for _ in range(4):
                await silent.wait_answered(await silent.call(rpc, authorization, request.SerializeToString()))
            with pytest.raises(QuotaExceeded, match="project_max_calls"):
                await client.rollouts.ListRollouts(request)
        while True:
            try:
                await client.rollouts.ListRollouts(request)
            except QuotaExceeded:
                continue
            return
