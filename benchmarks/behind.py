"""How long the trainer waits while a version is published and a checkpoint is written: at once, and behind the training.

A Llama of random weights is trained in this process on rows of equal length, one optimiser step each time. After each
step a version is written as a delta of bfloat16, and a checkpoint with weights and moments, flushed and with checksums.
`waits` is the time from the end of one step to the beginning of the next. At once, it is that of both files; behind, that
of the copies and of what is left of the former files. Steps behind and at once take turns. No engine reads the
versions: `benchmarks.publish` measures that.

    python -m benchmarks.behind --hidden 768 --layers 12 --steps 2

`python -m benchmarks.train --only behind` writes what it measures to benchmarks/results/train.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.outcome import Claim, claim, show
from benchmarks.trainer import build_model
from fulmen_algorithm.persistence.checkpoints import CheckpointStore
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.policy.versions import Versions
from fulmen_algorithm.runs.ports import SavedModel
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import BatchSettings, DeltaWeights, OptimizerSettings, StepSettings

WAIT_GOAL = 0.05
"""Share of a step for which the trainer may wait."""


def make_rows(options: argparse.Namespace) -> list[Row]:
    """Makes rows of `options.tokens` tokens."""
    chance = random.Random(0)
    draw = lambda count: [chance.randrange(options.vocabulary) for _ in range(count)]  # noqa: E731
    return [
        row_from_completion(
            rollout_id=f"rollout-{index}",
            prompt_ids=draw(32),
            completion_ids=draw(options.tokens - 32),
            logprobs=[-9.0] * (options.tokens - 32),
            advantage=chance.uniform(-1, 1),
            version=0,
        )
        for index in range(options.rows)
    ]


@dataclass(kw_only=True)
class Way:
    """One way to write, and the seconds that steps and waits took."""

    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    versions: list[float] = field(default_factory=list)
    checkpoints: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Returns medians."""
        found = {name: statistics.median(values) for name, values in vars(self).items() if values}
        return {**found, "wait_share": found["waits"] / found["steps"]}


class Writing:
    """Writes versions and checkpoints of one trainer."""

    def __init__(self, folder: Path, trainer: InProcessTrainer) -> None:
        self._trainer = trainer
        self._versions = Versions(files=RunFiles(folder), trainer=trainer, weights=DeltaWeights(full_every=1000))
        self._store = CheckpointStore(directory=folder / "checkpoints", keep=1)
        self._number = 0

    async def at_once(self, way: Way) -> None:
        """Writes both before anything else."""
        began = time.monotonic()
        saved = await self._versions.write(self._number)
        way.versions.append(time.monotonic() - began)
        self._served(saved)
        await self._checkpoint(self._trainer.write_state, way)

    async def behind(self, way: Way) -> asyncio.Task[None]:
        """Copies both, and returns what writes them."""
        began = time.monotonic()
        save = await self._versions.copied(self._trainer, self._number)
        write = await self._trainer.copy_state()
        way.copies.append(time.monotonic() - began)

        async def both() -> None:
            began = time.monotonic()
            saved = await save()
            way.versions.append(time.monotonic() - began)
            self._served(saved)
            await self._checkpoint(write, way)

        return asyncio.create_task(both(), name="behind")

    def _served(self, saved: SavedModel) -> None:
        self._number += 1
        name = f"resources/policy.policy/versions/{self._number}"
        self._versions.add(version=self._number, name=name, step=self._number, saved=saved)
        self._versions.served(self._number)

    async def _checkpoint(self, write: Callable[[Path], Awaitable[None]], way: Way) -> None:
        began = time.monotonic()
        folder = await asyncio.to_thread(self._store.begin)
        await write(folder)
        await asyncio.to_thread(self._store.complete, folder, {"step": self._number})
        way.checkpoints.append(time.monotonic() - began)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Takes steps in turns."""
    parameters = build_model(folder / "model", options)
    rows, settings = make_rows(options), StepSettings(token_budget=options.token_budget)
    thread = TorchThread(torch_threads=options.threads)
    setup = TrainerSetup(model_dir=folder / "model", optimizer=OptimizerSettings(learning_rate=1e-6), seed=0)
    trainer = await InProcessTrainer.open(setup, thread=thread, device="cpu")
    writing = Writing(folder, trainer)
    ways = {"at once": Way(), "behind": Way()}
    alone: list[float] = []

    async def step() -> float:
        began = time.monotonic()
        await trainer.train(rows, settings=settings, batch=BatchSettings(), seed=0, current_version=0)
        return time.monotonic() - began

    await step()
    await writing.at_once(Way())
    for _ in range(options.steps):
        alone.append(await step())
        way, began = ways["at once"], time.monotonic()
        await writing.at_once(way)
        way.waits.append(time.monotonic() - began)
        way.steps.append(await step())
        way, began = ways["behind"], time.monotonic()
        task = await writing.behind(way)
        copied = time.monotonic() - began
        way.steps.append(await step())
        began = time.monotonic()
        await task
        way.waits.append(copied + time.monotonic() - began)
    await trainer.close()
    thread.close()
    found = {name: way.summary() for name, way in ways.items()}
    return {"parameters": parameters, "step_alone_s": statistics.median(alone), "ways": found}


def claims_of(raw: dict[str, object]) -> Sequence[Claim]:
    """Compares with the goal."""
    ways: dict[str, dict[str, float]] = raw["ways"]  # type: ignore[assignment]  # a document
    return [
        claim(
            "trainer waits for a version and a checkpoint, of a step, written behind",
            ways["behind"]["wait_share"], "share", goal=WAIT_GOAL, better="lower",
        ),
    ]  # fmt: skip


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.behind", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row")
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1, help="threads of the trainer")
    parser.add_argument("--steps", type=int, default=3, help="steps of each way")
    parser.add_argument("--short", action="store_true", help="a small model")
    parser.add_argument("--output", type=Path, help="where the metrics are written too")
    options = parser.parse_args()
    if options.short:
        options.hidden, options.layers, options.steps = 256, 4, 2
    with tempfile.TemporaryDirectory(prefix="fulmen-behind-") as folder:
        raw = asyncio.run(measure(options, Path(folder)))
    given = {name: value for name, value in vars(options).items() if name != "output"}
    raw |= {"arguments": given, "torch": torch.__version__}
    claims = claims_of(raw)
    show(raw, claims)
    if options.output:
        options.output.write_text(json.dumps({**raw, "claims": claims}, indent=2) + "\n")


if __name__ == "__main__":
    main()
