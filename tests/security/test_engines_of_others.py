"""An engine joins the run of its token and no other, and downloads nothing but what that run has published."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2, weight_service_pb2
from fulmen.algorithm.v1.engine_service_pb2_grpc import EngineServiceStub
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.errors import (
    ArgumentInvalid,
    FulmenError,
    ModelNotFound,
    ResourceNotFound,
    TrainingRunNotFound,
    Unavailable,
)
from fulmen.models.transfer import upload_model
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.model_folders import model_folder
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle, Stubs, create_project, engine_token

A, B = "projects/a", "projects/b"
LIMIT_S = 30.0
GOOD = {"engine_id": "gpu-7", "base_url": "http://127.0.0.1:8000/v1"}
DEMONSTRATION = b'{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n'


class Service:
    """The algorithm service, as its callers reach it."""

    def __init__(self, target: str, stack: AsyncExitStack) -> None:
        self._target, self._stack = target, stack

    async def channel(self, token: str) -> Any:
        return await self._stack.enter_async_context(open_channel(self._target, token=token))

    async def joins(self, token: str, *messages: pb.JoinEngineRequest, **hello: Any) -> FulmenError | None:
        """Joins and says something; returns the error with which the stream ends."""

        async def said() -> AsyncIterator[pb.JoinEngineRequest]:
            yield pb.JoinEngineRequest(hello=pb.EngineHello(**hello))
            for message in messages:
                yield message
            await asyncio.sleep(LIMIT_S)

        stream = EngineServiceStub(await self.channel(token)).JoinEngine(said())
        try:
            async with asyncio.timeout(LIMIT_S):
                async for _ in stream:
                    pass
        except FulmenError as error:
            return error
        finally:
            stream.cancel()
        return None


@pytest.fixture
async def service(store: StoreHandle, stubs: Stubs, tmp_path: Path) -> AsyncIterator[Service]:
    for project in (A, B):
        await create_project(stubs, project)
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(serving("algorithm", store, tmp_path / "service", model_roots="/"))
        yield Service(target_of(parts), stack)


async def run_of(service: Service, store: StoreHandle, folder: Path) -> str:
    """Creates a run of project a, which nobody executes."""
    client = store.token(Role.CLIENT, project=A)
    demonstrations = resource_pb2.ResourceVersion(name="resources/said", kind="dataset", content=DEMONSTRATION)
    published = resource_service_pb2.PublishResourcesRequest(resources=[demonstrations])
    await (await store.stubs(token=client)).resources.PublishResources(published)
    run = training_run_pb2.TrainingRun(
        algorithm="sft",
        project=A,
        policy=training_run_pb2.PolicySpec(name="p-a", path=str(model_folder(folder / "model", size_bytes=1000))),
        inputs={"demonstrations": "resources/said/versions/1"},
    )
    request = training_run_service_pb2.CreateTrainingRunRequest(training_run=run)
    answer = await TrainingRunServiceStub(await service.channel(client)).CreateTrainingRun(request)
    return str(answer.training_run.name)


async def test_an_engine_joins_the_run_that_its_token_names_alone(
    service: Service, store: StoreHandle, tmp_path: Path
) -> None:
    run = await run_of(service, store, tmp_path)
    answers = {
        token: await service.joins(engine_token(token), training_run=run, **GOOD)
        for token in (run, f"{A}/trainingRuns/none", f"{B}/trainingRuns/{run.rpartition('/')[2]}")
    }
    absent = await service.joins(engine_token(f"{A}/trainingRuns/none"), training_run=f"{A}/trainingRuns/none", **GOOD)
    assert [type(answer) for answer in answers.values()] == [Unavailable, TrainingRunNotFound, TrainingRunNotFound]
    # What is another's is as if it did not exist.
    told = {
        str(answer).replace(run, "RUN").replace(f"{A}/trainingRuns/none", "RUN") for answer in [*answers.values()][1:]
    }
    assert told == {str(absent).replace(f"{A}/trainingRuns/none", "RUN")}


@pytest.mark.parametrize(
    ("hello", "refused"),
    [
        ({}, ["hello.engine_id", "hello.base_url"]),
        ({"engine_id": "Gpu_7", "base_url": "file:///etc/passwd"}, ["hello.engine_id", "hello.base_url"]),
        (GOOD | {"base_url": "http://127.0.0.1/v1"}, ["hello.base_url"]),
        (GOOD | {"base_url": "http://x:y@127.0.0.1:8000/v1"}, ["hello.base_url"]),
        (GOOD | {"base_url": "http://127.0.0.1:8000/v1?a=b"}, ["hello.base_url"]),
        (GOOD | {"base_url": "http://127.0.0.1:99999/v1"}, ["hello.base_url"]),
        (GOOD | {"engine_id": "a" * 33}, ["hello.engine_id"]),
        (GOOD | {"policy_version": -1}, ["hello.sha256"]),
        (GOOD | {"peer_target": "10.0.0.7"}, ["hello.peer_target", "hello.peer_key"]),
        (GOOD | {"peer_target": "10.0.0.7:1/x", "peer_key": "k" * 32}, ["hello.peer_target"]),
        (GOOD | {"peer_target": "10.0.0.7:1", "peer_key": "k\r" * 32}, ["hello.peer_key"]),
        (GOOD | {"policy_version": 1, "sha256": "x" * 64}, ["hello.sha256"]),
    ],
    ids=str,
)
async def test_every_problem_of_a_hello_is_told(
    service: Service, hello: dict[str, Any], refused: Sequence[str]
) -> None:
    run = f"{A}/trainingRuns/none"
    error = await service.joins(engine_token(run), training_run=run, **hello)
    assert isinstance(error, ArgumentInvalid)
    assert [violation.field for violation in error.violations] == refused


async def test_an_engine_downloads_what_its_run_has_published_alone(
    service: Service, store: StoreHandle, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model", size_bytes=1000)
    weights = WeightServiceStub(await service.channel(store.token(Role.CLIENT, project=A)))
    uploaded = await upload_model(weights, folder)
    stubs = await store.stubs(token=store.token(Role.SERVICE, project=A))
    content = {"kind": "full", "path": str(folder), "sha256": "", "step": 0}
    for policy, run in (("own", f"{A}/trainingRuns/own"), ("others", f"{A}/trainingRuns/other")):
        described = json.dumps(content | {"run": run}).encode()
        version = resource_pb2.ResourceVersion(name=f"resources/policy.{policy}", kind="policy", content=described)
        await stubs.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
    engine = WeightServiceStub(await service.channel(engine_token(f"{A}/trainingRuns/own")))

    async def asked(**source: str) -> object:
        named = weight_service_pb2.WeightSource(**source)
        requests = (
            engine.GetWeights(weight_service_pb2.GetWeightsRequest(source=named)),
            anext(
                aiter(engine.DownloadChunks(weight_service_pb2.DownloadChunksRequest(source=named, path="config.json")))
            ),
        )
        answers = await asyncio.gather(*requests, return_exceptions=True)
        return [type(answer) if isinstance(answer, FulmenError) else True for answer in answers]

    assert await asked(policy_version="resources/policy.own/versions/1") == [True, True]
    assert await asked(policy_version="resources/policy.others/versions/1") == [ResourceNotFound] * 2
    assert await asked(model=uploaded.model.name) == [ModelNotFound] * 2
