"""What publishing a version costs: all weights, what changed, or adapters; bytes, seconds, and the engine's pause.

A Llama of random weights (standard deviation 0.02, off the bfloat16 grid) is trained by AdamW with the given learning
rate on random answers, so that every weight moves by up to the learning rate in each step; that is more than later in a
run. After each step a version is published to the embedded engine, in a process of its own, which answers requests
without a break; a request that fails, or an answer with a token of no version, counts. `publish_seconds` is from the
first byte written to the engine's answer that the new weights are in; the pause is the engine's own measurement.
Medians of the steps after the first version.

    python -m benchmarks.publish --hidden 512 --layers 8 --steps 10

`python -m benchmarks.train --only publish` writes what it measures to benchmarks/results/train.json.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.outcome import Claim, claim, show
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.process import EngineProcess
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.policy.versions import Versions
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import (
    DeltaWeights,
    FullWeights,
    LoraSettings,
    OptimizerSettings,
    StepSettings,
    WeightsSettings,
)
from fulmen_algorithm.weights.delta import DELTA_FILE, apply, encode
from fulmen_algorithm.weights.tensor_files import Weights, read_folder

MAKE_MODEL = Path(__file__).resolve().parents[1] / "examples" / "arithmetic" / "make_model.py"
QUESTION = {"model": "policy", "messages": [{"role": "user", "content": "12+34="}], "max_tokens": 16}
LOAD = 2


@dataclass(kw_only=True)
class Traffic:
    """Requests that continue while versions change."""

    answered: int = 0
    failed: int = 0
    spanning: int = 0

    async def run(self, base_url: str) -> None:
        """Asks one question after another until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
            while True:
                async with client.post(f"{base_url}/chat/completions", json=QUESTION) as response:
                    body = await response.json()
                    ranges = body.get("weight_versions", [])
                    whole = response.ok and ranges and ranges[-1]["end"] == body["usage"]["completion_tokens"]
                    self.answered += 1
                    self.failed += not whole
                    self.spanning += len(ranges) > 1


class Direct:
    """A swap without a proxy: nothing holds, nothing is promoted."""

    async def hold(self, ttl_s: float) -> None:
        """Does nothing."""

    async def idle(self, limit_s: float) -> bool:
        """Does nothing."""
        return True

    async def promote(self) -> None:
        """Does nothing."""

    async def release(self) -> None:
        """Does nothing."""


@dataclass(kw_only=True)
class Kind:
    """One way to publish, and what it took."""

    name: str
    weights: WeightsSettings
    lora: LoraSettings | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)

    def median(self, metric: str) -> float:
        """Returns the median over the versions."""
        return statistics.median(one[metric] for one in self.metrics)

    def summary(self) -> dict[str, object]:
        """Returns medians, and the least and the most."""
        names = self.metrics[0]
        spread = {n: [min(f[n] for f in self.metrics), max(f[n] for f in self.metrics)] for n in names}
        return {
            "kind": self.name,
            **{n: self.median(n) for n in names},
            "spread": spread,
            "requests": self.traffic.answered,
            "requests_failed": self.traffic.failed,
            "answers_over_two_versions": self.traffic.spanning,
        }


def row(number: int) -> Row:
    """Makes an answer to learn."""
    ids = tuple(4 + (7 * n + number * number) % 12 for n in range(32))
    mask = (False,) * 8 + (True,) * 24
    return Row(
        rollout_id=str(number),
        token_ids=ids,
        loss_mask=mask,
        old_logprobs=(0.0,) * 32,
        advantages=tuple(map(float, mask)),
        policy_versions=(0,) * 32,
    )


async def measure(kind: Kind, model: Path, folder: Path, arguments: argparse.Namespace) -> None:
    """Publishes one version after the other in one way."""
    thread = TorchThread(torch_threads=1)
    optimizer = OptimizerSettings(learning_rate=arguments.learning_rate)
    setup = TrainerSetup(model_dir=model, optimizer=optimizer, seed=0, lora=kind.lora)
    trainer = await InProcessTrainer.open(setup, thread=thread, device="cpu")
    files = RunFiles(folder)
    base = model if kind.lora else None
    versions = Versions(files=files, trainer=trainer, weights=kind.weights, lora=kind.lora, base_model=base)
    saved = await versions.write(0)
    first = versions.add(version=1, name="resources/policy.policy/versions/1", step=0, saved=saved)
    versions.served(1)
    options = EngineOptions(
        host="127.0.0.1", advertise_host="127.0.0.1", port=0, token="", torch_threads=1, device="cpu", max_batch_size=8
    )
    engine = await EngineProcess.start(options, first, ModuleStarter(warm=False))
    try:
        async with traffic(kind.traffic, engine.address.base_url):
            for number in range(2, arguments.steps + 2):
                rows = [row(number + n) for n in range(4)]
                await trainer.train_supervised(rows, settings=StepSettings(max_grad_norm=1e9))
                began = time.monotonic()
                saved = await versions.write(number)
                wrote = time.monotonic()
                name = f"resources/policy.policy/versions/{number}"
                published = versions.add(version=number, name=name, step=number, saved=saved)
                swapped = await engine.swap(published, Direct())
                versions.served(number)
                kind.metrics.append(
                    {
                        "publish_bytes": saved.size_bytes,
                        "publish_bytes_full": saved.full_bytes,
                        "publish_seconds": time.monotonic() - began,
                        "write_seconds": wrote - began,
                        "publish_pause_ms": 1000 * swapped.pause_s,
                        "changed_share": saved.changed_share,
                    }
                )
                await versions.prune([number])
    finally:
        await engine.stop()
        thread.close()


@asynccontextmanager
async def traffic(counts: Traffic, base_url: str) -> AsyncIterator[None]:
    """Keeps requests going for as long as it is entered; a request that raises ends the benchmark."""
    tasks = [asyncio.create_task(counts.run(base_url), name=f"traffic-{n}") for n in range(LOAD)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


def codec(model: Path, folder: Path) -> dict[str, float]:
    """Measures the codec alone, on the words of a model in bfloat16 of which a fiftieth moves by one."""
    import numpy as np

    weights = read_folder(model)
    moved = {}
    chance = np.random.default_rng(0)
    for name, tensor in weights.tensors.items():
        words = np.array(tensor.words)
        words[chance.random(words.size) < 0.02] += 1
        moved[name] = type(tensor)(dtype=tensor.dtype, shape=tensor.shape, words=words)
    weights.sha256()
    new = Weights(tensors=moved)
    folder.mkdir()
    began = time.perf_counter()
    size = encode(weights, new, folder / DELTA_FILE)
    encoded = time.perf_counter()
    apply(weights, folder / DELTA_FILE)
    applied = time.perf_counter()
    return {
        "encode_gb_per_second": size.full_bytes / (encoded - began) / 1e9,
        "apply_gb_per_second": size.full_bytes / (applied - encoded) / 1e9,
        "size_share": size.size_bytes / size.full_bytes,
    }


def claims_of(kinds: Sequence[Kind]) -> list[Claim]:
    """Compares with the goals."""
    by_name = {kind.name: kind for kind in kinds}
    delta, full = by_name["delta"], by_name["full"]
    share = delta.median("publish_bytes") / delta.median("publish_bytes_full")
    pause_ms = max(f["publish_pause_ms"] for f in delta.metrics)
    seconds, seconds_full = delta.median("publish_seconds"), full.median("publish_seconds")
    failed = sum(k.traffic.failed for k in kinds)
    return [
        claim("bytes of a version as a delta, of all weights in bfloat16", share, "share", goal=0.03, better="lower"),
        claim("longest pause of sampling while a delta is put in", pause_ms, "ms", goal=1000, better="lower"),
        claim("publishing a delta, against all weights", seconds, "s", goal=seconds_full, better="lower"),
        claim("requests that failed while versions changed", failed, "requests", goal=0, better="lower"),
    ]


async def run(arguments: argparse.Namespace) -> None:
    """Measures every kind."""
    spec = importlib.util.spec_from_file_location("make_model", MAKE_MODEL)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(MAKE_MODEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = [
        Kind(name="full_float32", weights=FullWeights()),
        Kind(name="full", weights=FullWeights(dtype="bfloat16")),
        Kind(name="delta", weights=DeltaWeights(full_every=1000)),
        Kind(name="lora", weights=FullWeights(dtype="bfloat16"), lora=LoraSettings(rank=16)),
    ]
    with tempfile.TemporaryDirectory(prefix="fulmen-publish-") as folder:
        model = Path(folder) / "model"
        module.build(str(model), 0, hidden=arguments.hidden, layers=arguments.layers, heads=8, mlp=3 * arguments.hidden)
        for kind in kinds:
            sys.stdout.write(f"publish: {kind.name}, {arguments.steps} versions\n")
            sys.stdout.flush()
            await measure(kind, model, Path(folder) / kind.name, arguments)
        speed = codec(next((Path(folder) / "full" / "models").iterdir()), Path(folder) / "codec")
    given = {name: value for name, value in vars(arguments).items() if name != "output"}
    raw = {"arguments": given, "kinds": [k.summary() for k in kinds], "codec": speed}
    show(raw, claims_of(kinds))
    if arguments.output:
        arguments.output.write_text(json.dumps({**raw, "claims": claims_of(kinds)}, indent=2) + "\n")
    if any(kind.traffic.failed for kind in kinds):
        sys.exit(1)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512, help="width; a multiple of 8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="versions that are published in each way")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--short", action="store_true", help="a small model and three versions")
    parser.add_argument("--output", type=Path, help="where the metrics are written too")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.hidden, arguments.layers, arguments.steps = 128, 2, 3
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
