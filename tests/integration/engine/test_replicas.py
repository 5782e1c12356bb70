"""Several engines of one policy behind a real proxy: calls under swaps, deaths and impostors."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.engines.process import EngineProcess
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine
from fulmen_algorithm.runs.ports import EngineCount
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import row_from_completion
from fulmen_algorithm.training.settings import StepSettings
from tests.support.algorithm.embedded_engine import CLIENT_DEADLINE
from tests.support.algorithm.replicated import (
    CALLS,
    OPTIONS,
    WAIT_S,
    WORKERS,
    World,
    replicated_world,
    until,
    versions_of,
)

pytestmark = pytest.mark.timeout(420)

REPLICAS = 3
CLOSE = 1e-3
"""Largest difference of log-probabilities between engine and trainer, in nats."""


@pytest.fixture
async def world(model_dirs: list[Path], modules: ModuleStarter, tmp_path: Path) -> AsyncIterator[World]:
    async with replicated_world(model_dirs, EmbeddedEngine(replicas=REPLICAS), tmp_path, modules) as made:
        yield made


def check_tokens(records: list[ModelCallRecord], policies: list[PolicyModel]) -> None:
    """Checks that the tokens of each record have the probabilities that the weights of its version give them."""
    for record in records:
        assert record.usable, record.unusable_reason
        [version] = versions_of(record)
        prompt, completion = numbers(record.prompt_token_ids, "i"), numbers(record.completion_token_ids, "i")
        sampled = numbers(record.completion_logprobs, "f")
        row = row_from_completion(
            rollout_id="x",
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=sampled,
            advantage=0.0,
            version=0,
        )
        computed = logprobs_of(policies[version - 1], [row], settings=StepSettings())[0][len(prompt) :]
        assert sampled == pytest.approx(computed, abs=CLOSE)


def numbers(packed: bytes, kind: str) -> list[Any]:
    return memoryview(packed).cast(kind).tolist()


async def test_all_engines_serve_and_take_a_version_under_load_without_a_failed_call(
    world: World, policies: list[PolicyModel]
) -> None:
    serving = await world.serve()
    assert world.engines == EngineCount(REPLICAS, REPLICAS)
    assert sorted(await world.backends()) == ["engine-tiny", "engine.1-tiny", "engine.2-tiny"]
    async with world.load():
        alone = await world.starter.started[0].sampled_tokens()
        stats = await serving.swap(world.version(2))
    after = await world.calls(CALLS)
    assert set(world.answers) == {200}
    assert {target.policy_version for target in (await world.route()).targets} == {2}
    one_model = sum(file.stat().st_size for file in world.models[1].glob("*.safetensors"))
    assert stats.size_bytes == REPLICAS * one_model
    assert stats.pause_s > 0
    assert alone < await serving.sampled_tokens() == sum([await e.sampled_tokens() for e in world.starter.started])
    assert all([await engine.sampled_tokens() for engine in world.starter.started])
    assert len(world.starter.started) == REPLICAS

    records = await world.records(world.attempts)
    assert {tuple(versions_of(record)) for record in records} <= {(1,), (2,), (1, 2)}
    assert {tuple(versions_of(record)) for record in await world.records(after)} == {(2,)}
    check_tokens([record for record in records if len(versions_of(record)) == 1], policies)


async def test_a_killed_engine_costs_no_call_and_is_back_with_the_newest_version(world: World) -> None:
    serving = await world.serve()
    async with world.load():
        await serving.swap(world.version(2))
        async with asyncio.timeout(WAIT_S):
            while not (await world.proxy.health("engine.1-tiny")).in_flight_count:
                pass
        address = (await world.backends())["engine.1-tiny"].base_url
        (killed,) = [each for each in world.starter.started if each.address.base_url == address]
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: len(world.starter.started) > REPLICAS)
        await until(lambda: world.engines == EngineCount(REPLICAS, REPLICAS))
    registered = (await world.backends())["engine.1-tiny"].base_url
    (reborn,) = [each for each in world.starter.started[REPLICAS:] if each.address.base_url == registered]
    after = await world.calls(CALLS)
    async with asyncio.timeout(WAIT_S):
        # Its breaker lets calls through again within two seconds.
        while not await reborn.sampled_tokens():
            after += await world.calls(CALLS)
    assert set(world.answers) == {200}
    assert {tuple(versions_of(record)) for record in await world.records(after)} == {(2,)}
    assert [text for text in world.notices if "backends/engine.1-tiny is restarted" in text]


async def test_a_stale_engine_is_found_by_its_first_answer_and_replaced(
    world: World, policies: list[PolicyModel]
) -> None:
    serving = await world.serve()
    await serving.swap(world.version(2))
    stale = await EngineProcess.start(OPTIONS, world.version(1), world.modules)
    try:
        right = (await world.backends())["engine.2-tiny"]
        impostor = backend_pb2.Backend()
        impostor.CopyFrom(right)
        impostor.base_url = stale.address.base_url
        await world.proxy.backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=impostor))
        number = 0
        while not await answered(stale):
            await world.call(number)
            number += 1
        async with asyncio.timeout(WAIT_S):
            while (seen := (await world.backends())["engine.2-tiny"]) == impostor:
                pass
            while seen.base_url == stale.address.base_url:
                await world.calls(WORKERS)
                seen = (await world.backends())["engine.2-tiny"]
        await world.calls(CALLS)
        assert await answered(stale) == 1
    finally:
        await stale.stop()
    assert set(world.answers) == {200}
    records = await world.records(world.attempts)
    assert [versions_of(record) for record in records].count([1]) == 1
    check_tokens(records, policies)
    assert world.proxy.metric("stale_answers_total", backend="engine.2-tiny") == 1
    assert [text for text in world.notices if "answered a call with version 1" in text]


async def answered(engine: EngineProcess) -> int:
    """Returns how many answers an engine has given."""
    url = engine.address.base_url.removesuffix("/v1")
    async with aiohttp.ClientSession(timeout=CLIENT_DEADLINE) as client, client.get(f"{url}/admin/stats") as response:
        return int((await response.json())["requests"])
