"""From the loss of one of two machines to the next finished optimiser step.

    python -m benchmarks.machines.loss [--trials 3] [--short]

Each machine is a network namespace with a rank of `ddp`, which trains 18.4 M parameters. In the middle of a step one machine is
killed, so that its connections end, or cut off, so that it is silent. The step ends with the rank that is left, which hands its
state over; or, without `min_ranks`, after the newest checkpoint was read. Needs Linux, root and `ip`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import outcome
from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.remote import RemoteCluster
from fulmen_algorithm.cluster.wire import NODE_VARIABLE
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers.elastic import ElasticTrainer
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import BatchSettings, OptimizerSettings, StepSettings
from tests.support.algorithm.clusters import Hosts
from tests.support.algorithm.models import small_model
from tests.support.machines import AVAILABLE, SERVICE, Machines

NAME = "machines_loss"
GOAL_S = 30.0
SILENCE_S = 20.0
START_DEADLINE_S = 300.0
WIDTH, LAYERS = 512, 7
INTO_THE_STEP_S = 0.5
"""Time from the beginning of a step to the loss."""
PARALLEL = Ddp(ranks=2, min_ranks=1, cpus=2)
KINDS = {
    "killed, from the rank that is left": ("kill", True),
    "silent, from the rank that is left": ("cut_off", True),
    "killed, from the newest checkpoint": ("kill", False),
    "silent, from the newest checkpoint": ("cut_off", False),
}


def rows() -> list[Row]:
    """Returns 16 rows of 64 tokens."""
    return [
        row_from_completion(
            rollout_id=f"rollout-{index}",
            prompt_ids=[index % 20] * 32,
            completion_ids=[(index + place) % 20 for place in range(32)],
            logprobs=[-1.0] * 32,
            advantage=(-1.0) ** index,
            version=0,
        )
        for index in range(16)
    ]


async def step(trainer: Trainer, number: int) -> None:
    """Takes one optimiser step."""
    settings = StepSettings(token_budget=512, planned_steps=number)
    await trainer.train(rows(), settings=settings, batch=BatchSettings(), seed=number, current_version=0)


async def lose(model: Path, folder: Path, *, how: str, hands_over: bool) -> dict[str, float]:
    """Loses one machine of two in the second step; returns the seconds until that step is done, and those of a whole one."""
    with Machines(2) as machines:
        places = [machines.within(machine) for machine in range(2)]
        hosts = Hosts(places, variables=[{NODE_VARIABLE: f"host-{machine}"} for machine in range(2)])
        gate = Gate(GateOptions(host=SERVICE, silence_s=SILENCE_S))
        cluster = RemoteCluster(hosts, gate, start_deadline_s=START_DEADLINE_S)
        optimizer = OptimizerSettings(learning_rate=1e-4)
        setup = TrainerSetup(
            model_dir=model,
            run_dir=folder,
            optimizer=optimizer,
            seed=1,
            compute=ComputeSettings(parallel=PARALLEL),
        )
        trainer = await _opened(setup, cluster)
        try:
            began = time.perf_counter()
            await step(trainer, 0)
            step_s = time.perf_counter() - began
            state = folder / "checkpoint"
            state.mkdir()
            await trainer.write_state(state)
            if not hands_over:
                # What a run does whose trainer does not hand over.
                trainer = await _without_hand_over(trainer)
            second = asyncio.create_task(step(trainer, 1))
            await asyncio.sleep(INTO_THE_STEP_S)
            getattr(machines, how)(1)
            lost = time.perf_counter()
            try:
                await second
            except TrainerLost:
                await trainer.close()
                del places[1:]  # it does not come back
                trainer = await _opened(setup, cluster)
                await trainer.read_state(state)
                await step(trainer, 1)
            return {"seconds": time.perf_counter() - lost, "whole_step_s": step_s}
        finally:
            await trainer.close()
            gate.close()


async def _opened(setup: TrainerSetup, cluster: RemoteCluster) -> Trainer:
    return await ElasticTrainer.open(setup, GroupOptions(cluster=cluster), notify=lambda severity, text: None)


async def _without_hand_over(trainer: Trainer) -> Trainer:
    assert isinstance(trainer, ElasticTrainer)
    return trainer.group


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3, help="losses of each kind")
    parser.add_argument("--short", action="store_true", help="one loss of each kind; nothing is written")
    options = parser.parse_args(arguments)
    if not AVAILABLE:
        parser.error("needs Linux, root, ip and nsenter")
    raw: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        model = small_model(Path(place) / "model", hidden=WIDTH, layers=LAYERS)
        for kind, (how, hands_over) in KINDS.items():
            for trial in range(1 if options.short else options.trials):
                folder = Path(place) / f"{how}-{hands_over}-{trial}"
                folder.mkdir()
                found = asyncio.run(lose(model, folder, how=how, hands_over=hands_over))
                raw.setdefault(kind, []).append({name: round(value, 2) for name, value in found.items()})
                print(kind, raw[kind][-1], flush=True)
    claims = [
        outcome.claim(
            f"seconds from the loss of one of two machines to the next optimiser step: {kind}",
            median(each["seconds"] for each in found),
            "s",
            goal=GOAL_S,
            better="lower",
        )
        for kind, found in raw.items()
    ]
    if options.short:
        outcome.show(raw, claims)
    else:
        outcome.write(NAME, method=__doc__ or "", raw=raw, claims=claims)


if __name__ == "__main__":
    main()
