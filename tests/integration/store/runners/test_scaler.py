"""Demand for runners: counted in the real queue, told by rpc, as metrics, and to KEDA as KEDA asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import ArgumentInvalid, PermissionDenied
from fulmen.keda import externalscaler_pb2 as keda
from fulmen.keda import externalscaler_pb2_grpc
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.deploy.helm_chart import VALUES, render
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, create, create_project

LABELS = {"gpu": "h200"}


@pytest.fixture
async def scaler(store: StoreHandle) -> AsyncIterator[externalscaler_pb2_grpc.ExternalScalerStub]:
    """Yields a stub as KEDA's operator has it: a plain channel without any header."""
    async with grpc.aio.insecure_channel(store.target) as channel:
        yield externalscaler_pb2_grpc.ExternalScalerStub(channel)


def scaled(token: str, **metadata: str) -> keda.ScaledObjectRef:
    """Makes what KEDA sends: the whole metadata of the trigger, its own keys included."""
    own = {"scalerAddress": "fulmen-store:7101", "token": token}
    return keda.ScaledObjectRef(name="runners", namespace="fulmen", scalerMetadata={**own, **metadata})


async def demand(stubs: Stubs, **request: object) -> pb.GetFleetDemandResponse:
    """Asks until the figures are of now: they may be a second old."""
    return await stubs.runners.GetFleetDemand(pb.GetFleetDemandRequest(**request))


async def until(stubs: Stubs, wanted: int, queued: int, **request: object) -> pb.GetFleetDemandResponse:
    """Asks until so many runners are wanted while so many rollouts wait."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            answer = await demand(stubs, **request)
            if (answer.desired_runner_count, answer.queued_count) == (wanted, queued):
                return answer
            await asyncio.sleep(0.1)


async def test_the_demand_follows_the_queue_its_durations_labels_and_quota(store: StoreHandle, stubs: Stubs) -> None:
    assert (await demand(stubs)).desired_runner_count == 0
    assert (await demand(stubs, min_runners=2)).desired_runner_count == 2
    runner = await Runner(stubs).open()
    await create(stubs, 4, task_type="short")
    taken = await runner.take(4)
    await runner.complete(taken)
    await create(stubs, 400, task_type="short")
    await create(stubs, 30, task_type="new", required_labels=LABELS)
    hour = Duration(seconds=3600)
    # What is short takes milliseconds each, all of them less than an hour: one slot. Unknown, they would take seven.
    answer = await until(stubs, 1, 400, slots_per_runner=1, target_drain=hour)
    assert (answer.queued_count, answer.running_count) == (400, 0)
    assert 0 < answer.predicted_work.ToTimedelta().total_seconds() < 3600
    # Nothing is known of the others, which take the project's mean; 4 slots a runner, one for each at the most.
    answer = await demand(stubs, slots_per_runner=4, target_drain=Duration(seconds=1), labels=LABELS)
    assert answer.queued_count == 430
    held = await Runner(stubs).open()
    await held.take(100)
    assert (await until(stubs, 11, 300, slots_per_runner=10, target_drain=hour)).running_count == 100
    project = (await stubs.projects.GetProject(prj.GetProjectRequest(name="projects/default"))).project
    project.max_running = 40
    await stubs.projects.UpdateProject(prj.UpdateProjectRequest(project=project))
    # What runs goes on, beyond the quota too; nothing else is wanted.
    await until(stubs, 10, 300, slots_per_runner=10, target_drain=hour)
    reader = await store.stubs(role=Role.READER)
    assert (await demand(reader)).queued_count == 300
    with pytest.raises(PermissionDenied):
        await demand(reader, project="projects/*")
    for bad in ({"target_drain": Duration(nanos=1)}, {"slots_per_runner": -1}, {"min_runners": 5, "max_runners": 2}):
        with pytest.raises(ArgumentInvalid):
            await demand(stubs, **bad)


async def test_keda_scales_by_it(
    store: StoreHandle, stubs: Stubs, scaler: externalscaler_pb2_grpc.ExternalScalerStub
) -> None:
    token = store.token(Role.RUNNER)
    plain = scaled(
        token, slotsPerRunner="8", targetDrainSeconds="1.5", defaultDurationSeconds="30", project="projects/*"
    )
    assert not (await scaler.IsActive(plain)).result
    stream = scaler.StreamIsActive(plain)
    async with asyncio.timeout(LIMIT_S):
        assert not (await stream.read()).result
        await create(stubs, 5)
        await create(stubs, 3, required_labels=LABELS)
        assert (await stream.read()).result
    stream.cancel()
    (spec,) = (await scaler.GetMetricSpec(plain)).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("fulmen-wanted-slots", 8, 8.0)

    async def measured(request: keda.ScaledObjectRef) -> tuple[int, float]:
        # KEDA puts the place of the trigger before the name.
        asked = keda.GetMetricsRequest(scaledObjectRef=request, metricName="s0-fulmen-wanted-slots")
        (value,) = (await scaler.GetMetrics(asked)).metricValues
        return value.metricValue, value.metricValueFloat

    async with asyncio.timeout(LIMIT_S):
        labelled = scaled(token, labels="gpu=h200", targetDrainSeconds="1")
        while await measured(labelled) != (8, 8.0):  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.1)
    assert await measured(plain) == (5, 5.0)
    assert await measured(scaled(token, project="projects/nobody")) == (0, 0.0)


async def test_the_chart_asks_with_keys_that_the_store_knows(
    store: StoreHandle, scaler: externalscaler_pb2_grpc.ExternalScalerStub
) -> None:
    (trigger,) = render(VALUES["keda"]).one("ScaledObject")["spec"]["triggers"]
    metadata = trigger["metadata"]
    # KEDA keeps the key and sends the variable's value: that of `reader-token` in the release's Secret.
    resolved = metadata | {"tokenFromEnv": store.token(Role.READER, project="projects/*")}
    request = keda.ScaledObjectRef(name="x", scalerMetadata=resolved)
    assert (await scaler.GetMetricSpec(request)).metricSpecs[0].targetSize == int(metadata["slotsPerRunner"])
    assert not (await scaler.IsActive(request)).result
    with pytest.raises(grpc.aio.AioRpcError) as twice:
        await scaler.IsActive(keda.ScaledObjectRef(name="x", scalerMetadata=resolved | {"token": "other"}))
    assert twice.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_keda_is_refused_without_a_good_token_or_with_keys_that_nobody_knows(
    store: StoreHandle,
    stubs: Stubs,
    scaler: externalscaler_pb2_grpc.ExternalScalerStub,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    await create_project(stubs, "projects/a")
    bound, good = store.token(Role.READER, project="projects/a"), store.token(Role.SERVICE)
    secret = "a-secret-that-is-no-token"
    denied, missing, invalid = (
        grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT
    )  # fmt: skip
    refused = [
        (keda.ScaledObjectRef(name="x"), missing),
        (scaled(""), missing),
        (scaled(secret), missing),
        # Who may not ask is not told what is wrong with the question.
        (scaled(secret, nonsense="1"), missing),
        (scaled(bound, project="projects/b"), denied),
        (scaled(bound, project="projects/*"), denied),
        (scaled(good, nonsense=secret), invalid),
        (scaled(good, targetDrainSeconds="soon"), invalid),
        (scaled(good, targetDrainSeconds="nan"), invalid),
        (scaled(good, slotsPerRunner="0"), invalid),
        (scaled(good, slotsPerRunner="1.5"), invalid),
        (scaled(good, labels="gpu"), invalid),
    ]
    for request, code in refused:
        for call in (
            scaler.IsActive(request),
            scaler.GetMetricSpec(request),
            scaler.GetMetrics(keda.GetMetricsRequest(scaledObjectRef=request)),
            scaler.StreamIsActive(request).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is code, request
            assert secret not in str(caught.value)
    assert (await scaler.GetMetricSpec(scaled(bound))).metricSpecs[0].targetSize == 64
    with pytest.raises(grpc.aio.AioRpcError):
        await scaler.GetMetrics(keda.GetMetricsRequest(scaledObjectRef=scaled(good), metricName="other"))
    # A header of another role is not helped by a good token in the metadata.
    key = store.token(Role.CLIENT, project="projects/a")
    header = (("authorization", f"Bearer {key}"),)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scaler.IsActive(scaled(good, project="projects/b"), metadata=header)
    assert caught.value.code() is denied
    written = "".join(capfd.readouterr()) + caplog.text
    assert not any(each in written for each in (secret, bound, good, key))


async def test_a_forecast_is_asked_for_by_rpc_and_by_keda_and_told_once_it_was_compared(
    store: StoreHandle, stubs: Stubs, scaler: externalscaler_pb2_grpc.ExternalScalerStub
) -> None:
    ahead = Duration(seconds=60)
    answer = await demand(stubs, project="projects/*", forecast_horizon=ahead)
    assert not answer.HasField("forecast_slot_count")
    assert not answer.HasField("forecast_error")
    # The role samples every 15 s; here they come at once.
    fleet = store.parts.roles["fleet-demand"]
    await create(stubs, 10)
    await until(stubs, 1, 10, project="projects/*", forecast_horizon=ahead)
    census = await fleet.census()
    for number in range(60):
        work = replace(census.work[0], queued=number)
        fleet.sample(replace(census, work=[work]))
    answer = await demand(stubs, project="projects/*", forecast_horizon=ahead)
    assert answer.forecast_slot_count > 59
    assert answer.desired_slot_count == answer.forecast_slot_count
    assert 0 < answer.forecast_error < answer.naive_forecast_error
    scaled_object = scaled(store.token(Role.READER, project="projects/*"), project="projects/*", forecastSeconds="60")
    metrics = await scaler.GetMetrics(keda.GetMetricsRequest(scaledObjectRef=scaled_object))
    assert metrics.metricValues[0].metricValue == answer.forecast_slot_count
    with pytest.raises(ArgumentInvalid, match="forecast_horizon"):
        await demand(stubs, forecast_horizon=Duration(seconds=3601))
