"""One vLLM server for the whole test session, and a store and a proxy in front of it for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fulmen.llm_proxy.v1 import backend_pb2
from tests.support.algorithm.vllm import (
    BACKEND,
    VllmServer,
    build_models,
    require_vllm,
    running_vllm,
)
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the folders of two versions of the policy; vLLM starts with the first."""
    require_vllm()
    first, second = build_models(tmp_path_factory.mktemp("weights"), 1, 2)
    return first, second


@pytest.fixture(scope="session")
def shared_vllm(weights: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with running_vllm(weights[0], tmp_path_factory.mktemp("vllm") / "log") as server:
        yield server


@pytest.fixture
def vllm(shared_vllm: VllmServer, weights: tuple[Path, Path]) -> Iterator[VllmServer]:
    """Yields the server, with the first version of the policy; puts it back afterwards."""
    yield shared_vllm
    if shared_vllm.weight_version() not in ("default", "1"):
        shared_vllm.load(weights[0], 1)
    shared_vllm.resume()


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    async with FakeStore() as running:
        yield running


@pytest.fixture
async def proxy(store: FakeStore, vllm: VllmServer) -> AsyncIterator[RunningProxy]:
    """Yields a proxy with a trainable route to the server, policy version 1."""
    async with running_proxy(store.target) as running:
        await running.register(BACKEND, vllm.url, engine=backend_pb2.ENGINE_VLLM)
        await running.put_route(target(BACKEND))
        yield running
