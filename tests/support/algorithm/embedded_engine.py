"""An embedded engine under test, and the expected log-probabilities of its answers."""

import argparse
import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from fulmen_algorithm.engines.embedded.__main__ import arguments, build
from fulmen_algorithm.engines.embedded.generator import Generator
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import row_from_completion
from fulmen_algorithm.training.settings import StepSettings
from tests.support.algorithm.models import small_model

CLIENT_DEADLINE = aiohttp.ClientTimeout(total=60)
GATE_DEADLINE_S = 30


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    return [small_model(tmp_path_factory.mktemp(f"model-{seed}"), seed) for seed in (0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    generator: Generator
    client: aiohttp.ClientSession

    async def chat(self, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.client.post("/v1/chat/completions", json=chat_body(**body)) as response:
            return response.status, await response.json()

    async def stats(self) -> dict[str, int]:
        async with self.client.get("/admin/stats") as response:
            return await response.json()

    async def until_waiting(self, count: int) -> None:
        """Polls until that many requests wait; the test's deadline bounds it."""
        while (await self.stats())["waiting"] != count:
            pass

    async def swap(self, directory: Path, version: int) -> tuple[int, dict[str, Any]]:
        body = {"path": str(directory), "version": version}
        async with self.client.post("/admin/weights", json=body) as response:
            return response.status, await response.json()


class Hold:
    """Holds the model thread before one of its forward passes, counted from now on, until it is released."""

    def __init__(self, engine: Engine, *, at: int) -> None:
        self._left = at
        self._released = threading.Event()
        self._reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        engine.generator.model.register_forward_pre_hook(self._before)

    def _before(self, *_: object) -> None:
        self._left -= 1
        if not self._left:
            self._loop.call_soon_threadsafe(self._reached.set)
            self._released.wait(GATE_DEADLINE_S)

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), GATE_DEADLINE_S)

    def release(self) -> None:
        self._released.set()


def chat_body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "policy",
        "messages": [{"role": "user", "content": "12+34="}],
        "max_tokens": 8,
        "logprobs": True,
        "return_token_ids": True,
        **changes,
    }


@pytest.fixture
def options(model_dirs: list[Path]) -> argparse.Namespace:
    return arguments(["--model", str(model_dirs[0])])


@pytest.fixture
async def engine(options: argparse.Namespace) -> AsyncIterator[Engine]:
    generator, server = build(options, None)
    async with generator:
        runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, timeout=CLIENT_DEADLINE, connector=connector) as client:
            yield Engine(generator=generator, client=client)
        await runner.cleanup()


def teacher_forced(policy: PolicyModel, answer: dict[str, Any], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of an answer's tokens by one forward pass over the whole of it."""
    prompt, completion = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    row = row_from_completion(
        rollout_id="x",
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[0.0] * len(completion),
        advantage=0.0,
        version=0,
    )
    return logprobs_of(policy, [row], settings=StepSettings(temperature=temperature))[0][len(prompt) :]


def logprobs_in(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
