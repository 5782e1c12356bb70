"""Two vLLM servers are the engines of one policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.policy.engine_settings import VllmEngine
from fulmen_algorithm.runs.ports import EngineCount
from tests.support.algorithm.replicated import CALLS, OPTIONS, replicated_world, versions_of
from tests.support.algorithm.vllm import ENVIRONMENT

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(1200)]

TWO = VllmEngine(kind="vllm", replicas=2, dtype="float32", max_model_len=256, enforce_eager=True)


async def test_both_serve_and_take_a_version_under_load_without_a_failed_call(
    weights: tuple[Path, Path], tmp_path: Path
) -> None:
    command = str(ENVIRONMENT / "bin/vllm")
    options = replace(OPTIONS, vllm_command=command, log_folder=tmp_path, vllm_start_deadline_s=600)
    async with replicated_world(weights, TWO, tmp_path, ModuleStarter(warm=False), options=options) as world:
        serving = await world.serve()
        assert world.engines == EngineCount(2, 2)
        assert sorted(path.name for path in tmp_path.glob("*.log")) == ["vllm-tiny.1.log", "vllm-tiny.log"]
        async with world.load():
            stats = await serving.swap(world.version(2))
        after = await world.calls(CALLS)
        assert set(world.answers) == {200}
        assert stats.size_bytes == 2 * (weights[1] / "model.safetensors").stat().st_size
        assert all([await engine.sampled_tokens() for engine in world.starter.started])
        assert len(world.starter.started) == 2
        assert {tuple(versions_of(record)) for record in await world.records(after)} == {(2,)}
        seen = {tuple(versions_of(record)) for record in await world.records(world.attempts)}
        assert seen <= {(1,), (2,), (1, 2)}
        assert {(1,), (2,)} <= seen
