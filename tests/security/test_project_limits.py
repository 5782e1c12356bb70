"""A project that floods a service is refused with the time to wait, and every call of another project succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from fulmen.algorithm.v1 import training_run_service_pb2, training_run_service_pb2_grpc
from fulmen.errors import PermissionDenied, QuotaExceeded
from fulmen.ids import AttemptName, uuid7
from fulmen.keda import externalscaler_pb2, externalscaler_pb2_grpc
from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import (
    resource_service_pb2,
    rollout_pb2,
    rollout_service_pb2,
    secret_service_pb2,
    secret_service_pb2_grpc,
)
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.security.test_keys_of_ended_attempts import EXPORT
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy
from tests.support.services import serving, target_of
from tests.support.store.running import SIGNING_KEY, StoreHandle, Stubs, create_project, running_store

FLOODER, OTHER = "projects/team-a", "projects/team-b"
LIMITS: dict[str, Any] = {"project_calls_per_s": 20, "project_burst": 12, "project_max_calls": 6}
FLOOD = 48
OTHERS = 8
Call = Callable[[str], Awaitable[Any]]


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a store with low limits and two projects."""
    async with running_store(database_url, **LIMITS) as handle:
        stubs = await handle.stubs()
        for project in (FLOODER, OTHER):
            await create_project(stubs, project)
        yield handle


@pytest.fixture
async def proxy(store: StoreHandle) -> AsyncIterator[RunningProxy]:
    """Yields a proxy with low limits and a model."""
    async with (
        Backend() as engine,
        running_proxy(store.target, signing_key=SIGNING_KEY, backend_url=engine.url, **LIMITS) as running,
    ):
        yield running


async def flooded(call: Call) -> None:
    """Floods with one project while another works; checks who is refused, and how.

    Args:
        call: Makes one call for a project; raises QuotaExceeded, or another error, if it fails.
    """
    flood = [asyncio.create_task(call(FLOODER)) for _ in range(FLOOD)]
    for _ in range(OTHERS):
        await call(OTHER)
    outcomes = await asyncio.gather(*flood, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [one for one in refused if not isinstance(one, QuotaExceeded)] == []
    assert 0 < len(refused) < FLOOD
    for one in refused:
        assert one.retry_after_s is not None
        assert one.retry_after_s > 0
        assert FLOODER in one.message


def metadata(project: str, *, key: bool = False) -> tuple[tuple[str, str], ...]:
    """Returns the authorization of a client of a project, or of one of its attempts."""
    return (("authorization", f"Bearer {token(project, key=key)}"),)


def token(project: str, *, key: bool = False) -> str:
    signer = TokenSigner(SIGNING_KEY)
    if not key:
        return signer.issue(Role.CLIENT, subject="x", ttl_s=600, project=project)
    name = AttemptName(project=project, rollout_id=uuid7(), number=1)
    return signer.attempt_key(name, project=project, lease_id="l", epoch=1, mode="train", ttl_s=600)


@pytest.mark.parametrize("rpc", ["ListRollouts", "a filter", "BatchCreateRollouts", "PublishResources"])
async def test_rpcs_of_the_store(store: StoreHandle, rpc: str) -> None:
    stubs = Stubs(await store.stack.enter_async_context(open_channel(store.target)))
    pb, res = rollout_service_pb2, resource_service_pb2

    async def call(project: str) -> None:
        stub, request = {
            "ListRollouts": (stubs.rollouts.ListRollouts, pb.ListRolloutsRequest()),
            "a filter": (stubs.rollouts.ListRollouts, pb.ListRolloutsRequest(filter='state = "FAILED"')),
            "BatchCreateRollouts": (
                stubs.rollouts.BatchCreateRollouts,
                pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout() for _ in range(8)]),
            ),
            "PublishResources": (
                stubs.resources.PublishResources,
                res.PublishResourcesRequest(resources=[{"name": "resources/x", "kind": "data", "content": b"x"}]),
            ),
        }[rpc]
        await stub(request, metadata=metadata(project))

    await flooded(call)


async def test_calls_that_are_not_allowed_count_too(store: StoreHandle) -> None:
    async with open_channel(store.target) as channel:
        stub = secret_service_pb2_grpc.SecretServiceStub(channel)
        bearer = TokenSigner(SIGNING_KEY).issue(Role.READER, subject="x", ttl_s=600, project=FLOODER)
        request = secret_service_pb2.DeleteSecretRequest(name="NOT_MINE")
        calls = [stub.DeleteSecret(request, metadata=(("authorization", f"Bearer {bearer}"),)) for _ in range(FLOOD)]
        refused = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(one) for one in refused} == {PermissionDenied, QuotaExceeded}


async def test_exports_of_spans_over_grpc(store: StoreHandle) -> None:
    async with open_channel(store.target) as channel:
        export = channel.unary_unary(
            EXPORT,
            request_serializer=trace_service_pb2.ExportTraceServiceRequest.SerializeToString,
            response_deserializer=trace_service_pb2.ExportTraceServiceResponse.FromString,
        )

        async def call(project: str) -> None:
            await export(trace_service_pb2.ExportTraceServiceRequest(), metadata=metadata(project, key=True))

        await flooded(call)


async def raised(answer: aiohttp.ClientResponse) -> None:
    """Raises what a 429 says."""
    if answer.status == 429:
        raise QuotaExceeded(
            (await answer.read()).decode(errors="replace"), retry_after_s=float(answer.headers["retry-after"])
        )
    assert answer.status == 200, await answer.text()


async def test_exports_of_spans_over_http(store: StoreHandle) -> None:
    url = f"http://127.0.0.1:{store.parts.ports['http_port']}/v1/traces"
    async with aiohttp.ClientSession() as session:

        async def call(project: str) -> None:
            headers = dict(metadata(project, key=True)) | {"content-type": "application/x-protobuf"}
            async with session.post(url, data=b"", headers=headers) as answer:
                await raised(answer)

        await flooded(call)


@pytest.mark.parametrize("key", [False, True], ids=["clients", "attempts"])
async def test_model_calls_over_http(proxy: RunningProxy, key: bool) -> None:
    async def call(project: str) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        headers = dict(metadata(project, key=key))
        async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
            await raised(answer)

    await flooded(call)


async def test_model_calls_that_are_not_allowed_count_too(proxy: RunningProxy) -> None:
    bearer = TokenSigner(SIGNING_KEY).issue(Role.READER, subject="x", ttl_s=600, project=FLOODER)

    async def call() -> int:
        headers = {"authorization": f"Bearer {bearer}"}
        async with proxy.http.post(f"{proxy.url}/chat/completions", json={}, headers=headers) as answer:
            return answer.status

    assert set(await asyncio.gather(*(call() for _ in range(FLOOD)))) == {403, 429}


async def test_answers_of_models_count_by_their_bytes(store: StoreHandle) -> None:
    def long(_: dict[str, Any]) -> str:
        return "x" * 10 * 64 * 1024

    limits = LIMITS | {"project_calls_per_s": 0.01}
    async with (
        Backend(script=long) as engine,
        running_proxy(store.target, signing_key=SIGNING_KEY, backend_url=engine.url, **limits) as running,
    ):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        headers = dict(metadata(FLOODER))
        statuses = []
        for _ in range(3):
            async with running.http.post(f"{running.url}/chat/completions", json=body, headers=headers) as answer:
                await answer.read()
                statuses.append(answer.status)
    assert statuses[0] == 200
    assert statuses[-1] == 429


@pytest.mark.parametrize("role", [Role.CLIENT, Role.RUNNER], ids=["allowed", "not allowed"])
async def test_calls_of_the_scaler_whose_token_is_in_the_request(store: StoreHandle, role: Role) -> None:
    bearer = TokenSigner(SIGNING_KEY).issue(role, subject="x", ttl_s=600, project=FLOODER)
    async with open_channel(store.target) as channel:
        stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        request = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"token": bearer, "slotsPerRunner": "2"})
        outcomes = await asyncio.gather(*(stub.GetMetricSpec(request) for _ in range(FLOOD)), return_exceptions=True)
    assert QuotaExceeded in {type(one) for one in outcomes}


async def test_model_calls_over_grpc(proxy: RunningProxy) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}'
    request = completion_service_pb2.CompleteRequest(path="/v1/chat/completions", body_json=body)
    async with open_channel(target_of(proxy.parts)) as channel:
        stub = completion_service_pb2_grpc.CompletionServiceStub(channel)

        async def call(project: str) -> None:
            await stub.Complete(request, metadata=metadata(project))

        await flooded(call)


async def test_rpcs_of_the_algorithm_service(store: StoreHandle, tmp_path: Path) -> None:
    pb = training_run_service_pb2
    async with (
        serving("algorithm", store, tmp_path, roles=True, **LIMITS) as parts,
        open_channel(target_of(parts)) as channel,
    ):
        stub = training_run_service_pb2_grpc.TrainingRunServiceStub(channel)

        async def call(project: str) -> None:
            await stub.ListTrainingRuns(pb.ListTrainingRunsRequest(), metadata=metadata(project))

        await flooded(call)


async def test_services_are_not_limited(store: StoreHandle) -> None:
    stubs = await store.stubs(role=Role.SERVICE)
    request = rollout_service_pb2.ListRolloutsRequest()
    await asyncio.gather(*(stubs.rollouts.ListRollouts(request) for _ in range(FLOOD)))


async def test_a_stream_is_slowed_down_and_none_of_its_messages_is_lost(database_url: str) -> None:
    async with running_store(database_url, project_calls_per_s=50, project_burst=5, project_max_streams=1) as store:
        client = await store.stubs(role=Role.CLIENT)
        call = client.rollouts.StreamCreateRollouts()
        for _ in range(20):
            await call.write(rollout_service_pb2.StreamCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout()]))
        with pytest.raises(QuotaExceeded, match="project_max_streams"):
            await client.rollouts.StreamCreateRollouts().read()
        await call.done_writing()
        async with asyncio.timeout(60):
            assert len([answer async for answer in call]) == 20
