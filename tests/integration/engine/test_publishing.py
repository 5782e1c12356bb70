"""Versions go from a trainer into an engine process as deltas, and are restored after failures of either."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.process import EngineProcess
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.policy.versions import Versions
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import PublishedPolicy, SavedModel, SwapStats
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import (
    DeltaWeights,
    FullWeights,
    LoraSettings,
    OptimizerSettings,
    StepSettings,
    WeightsKind,
    WeightsSettings,
)
from fulmen_algorithm.weights.tensor_files import read_folder
from tests.support.algorithm.embedded_engine import CLIENT_DEADLINE, chat_body

pytestmark = pytest.mark.timeout(420)  # three engines start in one test

OPTIONS = EngineOptions(
    host="127.0.0.1", advertise_host="127.0.0.1", port=0, token="", torch_threads=1, device="cpu", max_batch_size=8
)
QUESTIONS = ("12+34=", "7+1=", "90+9=")


@dataclass
class Promotions:
    """The proxy's side of a swap, which counts."""

    promoted: int = 0

    async def hold(self, ttl_s: float) -> None:
        """Raises: the engine keeps serving while it reads weights."""
        raise AssertionError(ttl_s)

    async def idle(self, limit_s: float) -> bool:
        """Raises, like `hold`."""
        raise AssertionError(limit_s)

    async def promote(self) -> None:
        self.promoted += 1

    async def release(self) -> None:
        """Has nothing to release."""


@dataclass(kw_only=True)
class Publishing:
    """A run's trainer, the book of its versions, and the engines that serve them."""

    trainer: InProcessTrainer
    versions: Versions
    files: RunFiles
    modules: ModuleStarter
    engines: list[EngineProcess] = field(default_factory=list)
    gate: Promotions = field(default_factory=Promotions)
    role: str = ""

    async def publish(self, *, learn: bool = True) -> tuple[SavedModel, PublishedPolicy]:
        """Takes a training step and records a version."""
        number = len(self.versions.records) + 1
        if learn:
            await self.trainer.train_supervised([row(number, self.role)], settings=StepSettings())
        saved = await self.versions.write(number)
        published = self.versions.add(
            version=number, name=f"resources/policy.tiny/versions/{number}", step=number, saved=saved
        )
        return saved, published

    async def start(self, published: PublishedPolicy) -> EngineProcess:
        self.engines.append(await EngineProcess.start(OPTIONS, published, self.modules))
        return self.engines[-1]

    async def swap(self, engine: EngineProcess, published: PublishedPolicy) -> SwapStats:
        """Sends a version to an engine, as the policy does."""
        with self.versions.publishing(published.version):
            metrics = await engine.swap(published, self.gate)
        self.versions.served(published.version)
        return metrics


def row(number: int, role: str) -> Row:
    ids = tuple(4 + (5 * n + number) % 12 for n in range(8))
    mask = (False,) * 3 + (True,) * 5
    return Row(
        rollout_id=str(number),
        token_ids=ids,
        loss_mask=mask,
        old_logprobs=(0.0,) * 8,
        advantages=tuple(map(float, mask)),
        policy_versions=(0,) * 8,
        role=role,
    )


async def answers(engine: EngineProcess, model: str = "tiny") -> list[tuple[list[int], list[float]]]:
    """Asks the questions greedily; returns tokens and log-probabilities."""
    found = []
    async with aiohttp.ClientSession(timeout=CLIENT_DEADLINE) as client:
        for question in QUESTIONS:
            body = chat_body(model=model, temperature=0, messages=[{"role": "user", "content": question}])
            async with client.post(f"{engine.address.base_url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                choice = (await response.json())["choices"][0]
                found.append((choice["token_ids"], [t["logprob"] for t in choice["logprobs"]["content"]]))
    return found


@pytest.fixture
def weights() -> WeightsSettings:
    return DeltaWeights(full_every=4)


@pytest.fixture
def lora() -> LoraSettings | None:
    return None


@pytest.fixture
async def publishing(
    model_dirs: list[Path], tmp_path: Path, weights: WeightsSettings, lora: LoraSettings | None, modules: ModuleStarter
) -> AsyncIterator[Publishing]:
    thread = TorchThread(torch_threads=1)
    setup = TrainerSetup(model_dir=model_dirs[0], optimizer=OptimizerSettings(learning_rate=1e-4), seed=0, lora=lora)
    trainer = await InProcessTrainer.open(setup, thread=thread, device="cpu")
    files = RunFiles(tmp_path / "run")
    base = model_dirs[0] if lora else None
    versions = Versions(files=files, trainer=trainer, weights=weights, lora=lora, base_model=base)
    made = Publishing(trainer=trainer, versions=versions, files=files, modules=modules)
    yield made
    for engine in made.engines:
        await engine.stop()
    thread.close()


async def test_versions_by_delta_answer_as_a_fresh_engine_with_the_whole_folder_does(publishing):
    _, first = await publishing.publish(learn=False)
    engine = await publishing.start(first)
    publishing.versions.served(1)
    kinds, present = [], []
    for _ in range(5):
        saved, published = await publishing.publish()
        kinds.append(saved.kind)
        metrics = await publishing.swap(engine, published)
        assert metrics.size_bytes == saved.size_bytes
        present.append(await answers(engine))
    # A complete one after each three deltas, so that no chain has more than four links.
    assert kinds == [WeightsKind.DELTA] * 3 + [WeightsKind.FULL, WeightsKind.DELTA]
    assert publishing.gate.promoted == 5
    fresh = await publishing.start(publishing.versions.published(4))
    assert await answers(fresh) == present[2]
    for version in (2, 3, 6):
        # Whole weights go where no delta applies.
        await publishing.swap(fresh, publishing.versions.published(version))
        assert await answers(fresh) == present[version - 2]
    assert len({str(p) for p in present}) == 5

    os.kill(engine.pid, signal.SIGKILL)
    assert await engine.ended() == -signal.SIGKILL
    again = await publishing.start(publishing.versions.published(6))
    assert await answers(again) == present[-1]


@pytest.mark.long(short=True)
async def test_an_engine_that_is_stopped_is_ended_so_that_it_is_replaced(publishing):
    _, first = await publishing.publish(learn=False)
    engine = await publishing.start(first)
    os.kill(engine.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        assert await engine.ended() == -signal.SIGKILL


async def test_a_damaged_delta_is_refused_and_all_weights_are_sent(publishing):
    _, first = await publishing.publish(learn=False)
    engine = await publishing.start(first)
    publishing.versions.served(1)
    saved, published = await publishing.publish()
    file = saved.path / "delta.safetensors"
    file.write_bytes(file.read_bytes()[:-3] + b"\x00\x01\x02")
    metrics = await publishing.swap(engine, published)
    assert metrics.size_bytes > saved.full_bytes
    # The chain is broken; what the trainer wrote while it still had the weights is there, and is the same.
    whole = await publishing.versions.materialise(2)
    assert read_folder(whole).sha256() == saved.sha256
    # The next delta applies to what was sent whole.
    saved, published = await publishing.publish()
    assert saved.kind is WeightsKind.DELTA
    assert (await publishing.swap(engine, published)).size_bytes == saved.size_bytes


async def test_pruning_keeps_what_a_version_is_put_together_from(publishing):
    for number in range(1, 7):
        await publishing.publish(learn=number > 1)
        publishing.versions.served(number)
    versions, models = publishing.versions, publishing.files.models
    await versions.prune([4])
    assert {path.name[:6] for path in models.iterdir()} == {"000001", "000002", "000003", "000004"}
    whole = await versions.materialise(4)
    assert not list(whole.glob("delta*"))
    await versions.prune([4])
    assert whole.exists()
    with pytest.raises(RunFailed, match="cannot be rebuilt"):
        await versions.materialise(6)


@pytest.mark.long(short=True)
@pytest.mark.parametrize("lora", [LoraSettings(rank=4, roles=("planner", "solver"))])
@pytest.mark.parametrize("weights", [FullWeights()])
async def test_adapters_of_roles_answer_under_their_names_and_change_apart(publishing):
    publishing.role = "solver"
    _, first = await publishing.publish(learn=False)
    engine = await publishing.start(first)
    assert first.model_names == ("tiny", "tiny.planner", "tiny.solver")
    before = {model: await answers(engine, model) for model in first.model_names}
    assert before["tiny"] == before["tiny.planner"]
    for _ in range(3):
        saved, published = await publishing.publish()
        metrics = await publishing.swap(engine, published)
    assert saved.kind is WeightsKind.LORA
    assert 0 < metrics.size_bytes <= saved.size_bytes < 2 * saved.full_bytes
    after: dict[str, Any] = {model: await answers(engine, model) for model in first.model_names}
    assert after["tiny"] == before["tiny"]
    assert after["tiny.planner"] == before["tiny.planner"]
    assert after["tiny.solver"] != before["tiny.solver"]
