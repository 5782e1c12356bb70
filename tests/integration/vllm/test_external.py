"""A vLLM that the service does not run: it gets weights and adapters, and nothing else changes.

The service's own vLLM with adapters is here too: what it starts in this test passes everything on to the same server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save_file

from fulmen.errors import RouteNotFound
from fulmen_algorithm.engines.engine import EngineAddress, EngineFailed, EngineKind, EngineOptions
from fulmen_algorithm.engines.external import ExternalVllm
from fulmen_algorithm.engines.vllm import VllmProcess
from fulmen_algorithm.engines.vllm_api import VllmApi, Weights
from fulmen_algorithm.policy.engine_settings import ExternalEngine, SwapMode, VllmEngine
from fulmen_algorithm.runs.ports import PublishedPolicy
from fulmen_algorithm.training.settings import WeightsKind
from tests.support.algorithm.vllm import ADAPTER_RANK, MODEL, VllmServer

pytestmark = [pytest.mark.long(short=True), pytest.mark.xdist_group("vllm"), pytest.mark.timeout(720)]

HIDDEN = 64


class Gate:
    """Notes what is asked of the proxy."""

    def __init__(self, server: VllmServer) -> None:
        self.asked: list[str] = []
        self.refusal: Exception | None = None
        self._server = server

    async def hold(self, ttl_s: float) -> None:
        self.asked.append("hold")

    async def idle(self, limit_s: float) -> bool:
        self.asked.append("idle")
        return True

    async def promote(self) -> None:
        version = await asyncio.to_thread(self._server.weight_version)
        self.asked.append(f"promote, paused {await paused(self._server)}, version {version}")
        if self.refusal is not None:
            raise self.refusal

    async def release(self) -> None:
        self.asked.append("release")


@pytest.fixture
def options(vllm: VllmServer, tmp_path: Path) -> EngineOptions:
    """Returns the options of a service whose operator knows the server."""
    return EngineOptions(
        host="127.0.0.1",
        advertise_host="127.0.0.1",
        port=0,
        token="",
        torch_threads=1,
        device="cpu",
        max_batch_size=1,
        log_folder=tmp_path,
        external_keys={vllm.url: ""},
    )


@pytest.fixture
def adapters(vllm: VllmServer, tmp_path: Path) -> Iterator[list[Path]]:
    """Yields two adapters in peft's format; takes what was loaded out again."""
    yield [written_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2)]
    vllm.post("/v1/unload_lora_adapter", {"lora_name": "adapted"})


def written_adapter(folder: Path, seed: int) -> Path:
    """Writes an adapter of one module, large enough to change what is sampled."""
    random = np.random.default_rng(seed)
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    folder.mkdir()
    tensors = {
        f"{name}.lora_A.weight": random.normal(size=(ADAPTER_RANK, HIDDEN)).astype(np.float32),
        f"{name}.lora_B.weight": random.normal(size=(HIDDEN, ADAPTER_RANK)).astype(np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": 2 * ADAPTER_RANK, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def published(folder: Path, version: int) -> PublishedPolicy:
    return PublishedPolicy(name=f"resources/policy.{MODEL}/versions/{version}", version=version, path=folder)


async def paused(vllm: VllmServer) -> bool:
    return bool((await asyncio.to_thread(vllm.get, "/is_paused"))["is_paused"])


async def greedy(vllm: VllmServer, **fields: Any) -> list[int]:
    answer = await asyncio.to_thread(vllm.complete, "Count on", temperature=0, max_tokens=16, **fields)
    return list(answer["choices"][0]["token_ids"])


async def test_an_external_vllm_gets_the_weights_and_is_promoted_before_it_resumes(vllm, weights, options):
    external = ExternalEngine(kind="external", base_url=vllm.url, model=MODEL, key_name="there")
    old = await greedy(vllm)
    attaching = Gate(vllm)
    engine = await ExternalVllm.attach(options, published(weights[0], 7), external, lambda *_: None, attaching)
    assert attaching.asked == ["promote, paused True, version 7"]
    assert engine.address == EngineAddress(base_url=vllm.url, kind=EngineKind.VLLM, key_name="there", model=MODEL)
    assert (vllm.weight_version(), await greedy(vllm), await engine.healthy()) == ("7", old, True)
    gate = Gate(vllm)
    before = await engine.sampled_tokens()
    metrics = await engine.swap(published(weights[1], 8), gate)
    new = await greedy(vllm)
    assert new != old
    assert gate.asked == ["promote, paused True, version 8"]
    assert metrics.size_bytes == (weights[1] / "model.safetensors").stat().st_size
    assert metrics.pause_s > 0
    assert await engine.sampled_tokens() == before + 16
    await engine.stop()
    assert await engine.healthy()


async def test_weights_that_are_damaged_are_found_before_the_pause(vllm, weights, options, tmp_path):
    external = ExternalEngine(kind="external", base_url=vllm.url, model=MODEL)
    engine = await ExternalVllm.attach(options, published(weights[0], 1), external, lambda *_: None, Gate(vllm))
    old, gate = await greedy(vllm), Gate(vllm)
    whole = (weights[1] / "model.safetensors").read_bytes()
    for name, content in {"cut": whole[:-1], "long": whole + b"x", "text": b"weights", "none": None}.items():
        folder = tmp_path / name
        folder.mkdir()
        if content is not None:
            (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(EngineFailed):
            await engine.swap(published(folder, 2), gate)
    assert (gate.asked, await greedy(vllm), vllm.weight_version()) == ([], old, "1")


async def test_weights_that_vllm_refuses_and_a_proxy_that_refuses_leave_it_going_on(vllm, weights, options, tmp_path):
    external = ExternalEngine(kind="external", base_url=vllm.url, model=MODEL)
    engine = await ExternalVllm.attach(options, published(weights[0], 1), external, lambda *_: None, Gate(vllm))
    old = await greedy(vllm)
    strange = tmp_path / "strange"
    strange.mkdir()
    # Whole, and of another model.
    tensors = {"model.layers.0.input_layernorm.weight": np.zeros(3, dtype=np.float32)}
    save_file(tensors, strange / "model.safetensors")
    gate = Gate(vllm)
    with pytest.raises(EngineFailed, match="vLLM answered 500 to POST /collective_rpc"):
        await engine.swap(published(strange, 2), gate)
    assert (gate.asked, await paused(vllm), vllm.weight_version()) == ([], False, "1")
    assert await greedy(vllm) == old
    with pytest.raises(EngineFailed, match="vLLM answered 500 to POST /collective_rpc"):
        await ExternalVllm.attach(options, published(strange, 2), external, lambda *_: None, gate)
    assert (gate.asked, await paused(vllm)) == ([], False)
    unseen = Weights(folder=tmp_path / "not mounted there", adapters={}, size_bytes=0)
    api, numbers = VllmApi(vllm.root, ""), {"drain_limit_s": 1.0, "recompute_cache": True}
    with pytest.raises(EngineFailed, match="vLLM answered 500 to POST /collective_rpc"):
        await api.swap(unseen, 2, gate, mode=SwapMode.FREEZE, **numbers)
    assert (await greedy(vllm), await paused(vllm)) == (old, False)
    gate.refusal = RouteNotFound("No route serves the policy.")
    with pytest.raises(RouteNotFound):
        await engine.swap(published(weights[1], 3), gate)
    assert (await paused(vllm), vllm.weight_version()) == (False, "3")
    await engine.swap(published(weights[0], 4), Gate(vllm))
    assert await greedy(vllm) == old


async def test_a_server_that_the_operator_does_not_name_is_not_called(vllm, weights, options):
    external = ExternalEngine(kind="external", base_url=vllm.url.replace("127.0.0.1", "localhost"))
    with pytest.raises(EngineFailed, match="is not in the service's setting external_engines"):
        await ExternalVllm.attach(options, published(weights[1], 3), external, lambda *_: None, Gate(vllm))
    assert vllm.weight_version() != "3"


async def test_an_adapter_is_loaded_and_replaced_while_it_serves(vllm, adapters):
    api = VllmApi(vllm.root, "")
    base = await greedy(vllm)
    await api.load_adapter(adapters[0], "adapted")
    first = await greedy(vllm, model="adapted")
    await api.load_adapter(adapters[1], "adapted")
    second = await greedy(vllm, model="adapted")
    assert len({tuple(tokens) for tokens in (base, first, second)}) == 3
    assert await greedy(vllm) == base
    with pytest.raises(EngineFailed, match="vLLM answered 404"):
        await api.load_adapter(adapters[0].with_name("nowhere"), "adapted")
    assert await greedy(vllm, model="adapted") == second


# In the place of vLLM's program: passes every connection to its port on to the server of the tests.
RELAY = """\
#!{python}
import asyncio, sys


async def copied(reader, writer):
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()
    writer.close()


async def passed_on(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", {port})
    await asyncio.gather(copied(reader, there[1]), copied(there[0], writer), return_exceptions=True)


async def main():
    server = await asyncio.start_server(passed_on, "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
    await server.serve_forever()


asyncio.run(main())
"""


async def test_a_policy_of_adapters_is_swapped_in_place_and_the_base_model_stays(
    vllm, weights, adapters, options, tmp_path
):
    program = tmp_path / "vllm"
    program.write_text(RELAY.format(python=sys.executable, port=urlsplit(vllm.root).port))
    program.chmod(0o755)
    first, second = (
        PublishedPolicy(
            name=f"resources/policy.adapted/versions/{version}",
            version=version,
            kind=WeightsKind.LORA,
            path=folder,
            base_model=weights[0],
            adapters={"default": folder},
        )
        for version, folder in zip((11, 12), adapters, strict=True)
    )
    base = await greedy(vllm)
    process = await VllmProcess.start(
        replace(options, vllm_command=str(program), log_folder=tmp_path / "logs"),
        first,
        VllmEngine(kind="vllm"),
        lambda *_: None,
    )
    try:
        old, named = await greedy(vllm, model="adapted"), vllm.weight_version()
        gate = Gate(vllm)
        metrics = await process.swap(second, gate)
        new = await greedy(vllm, model="adapted")
    finally:
        await process.stop()
    assert len({tuple(tokens) for tokens in (base, old, new)}) == 3
    assert await greedy(vllm) == base
    assert (named, gate.asked, await paused(vllm)) == ("11", ["promote, paused True, version 12"], False)
    assert (metrics.pause_s > 0, metrics.size_bytes) == (
        True,
        (adapters[1] / "adapter_model.safetensors").stat().st_size,
    )
