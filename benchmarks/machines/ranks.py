"""One run on four machines of two ranks each, which joined it: what it learns, and what the loss of a machine costs.

    python -m benchmarks.machines.ranks [--machines 4] [--output FOLDER]

Machines are network namespaces (`tests.support.machines`), so it needs root. First the same rows are trained on by as many
ranks on one machine and on all of them: losses and weights must be equal bit for bit. Then a GRPO run loses a machine in the
middle of a step: every process in the namespace is killed. A machine that joined and waits takes its place.

The books are kept here, from what the queue delivered and what the run wrote down that it trained on, step by step; what the
service says of itself is not asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import outcome
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.cluster.port import Cluster
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.ports import Notify
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from fulmen_algorithm.training.settings import BatchSettings, StepSettings
from fulmen_exchange.registry import load_codecs
from tests.support.algorithm.joined_machines import CLUSTER, Door, door_of, open_door
from tests.support.algorithm.models import small_model
from tests.support.algorithm.run_service import created, grpo_draft_of, live, made_world, run_folder, service_at
from tests.support.algorithm.trainers import made_rows, setup_of, weights_of
from tests.support.algorithm.training import read_consumed
from tests.support.machines import AVAILABLE, SERVICE, Machines

NAME = "machines_ranks"
RANKS_EACH = 2
SILENCE_S = 5.0
START_DEADLINE_S = 300.0
RUN_LIMIT_S = 900.0
STEPS, LOST_AT = 6, 4
"""Steps of the run that loses a machine, and the step in the middle of which it does."""
GOAL_S = 30.0
Figures = dict[str, Any]


async def joined(door: Door, machines: Machines, count: int) -> None:
    """Has machines join, and waits until they have."""
    nodes = [f"node-{machine}" for machine in range(count)]
    for machine, node in enumerate(nodes):
        door.start_machine(node, ranks=RANKS_EACH, within=machines.within(machine))
    await door.until(*nodes)


async def learned(cluster: Cluster, model: Path, ranks: int, folder: Path) -> tuple[list[list[float]], object]:
    """Trains three steps; returns the losses and the weights."""
    none = load_codecs()["none"].settings.model_validate({"codec": "none"})
    setup = replace(setup_of(model, ComputeSettings(parallel=Ddp(ranks=ranks))), exchange=none)
    trainer = await RankGroupTrainer.open(setup, GroupOptions(cluster=cluster))
    try:
        losses = []
        for step in range(3):
            results = await trainer.train(
                made_rows(),
                settings=StepSettings(token_budget=64, planned_steps=2 * step, total_steps=20),
                batch=BatchSettings(minibatches=2),
                seed=step,
                current_version=3,
            )
            losses.append([result.loss for result in results])
        return losses, await weights_of(trainer, folder)
    finally:
        await trainer.close()


async def equality(machines: Machines, count: int, folder: Path) -> Figures:
    """Trains the same on one machine and on several."""
    model, modules = small_model(folder / "model"), ModuleStarter(warm=True)
    try:
        here = await learned(LocalCluster(modules), model, count * RANKS_EACH, folder / "here")
    finally:
        modules.close()
    async with open_door(folder / "service", host=SERVICE, start_deadline_s=START_DEADLINE_S) as door:
        await joined(door, machines, count)
        there = await learned(door.cluster, model, count * RANKS_EACH, folder / "there")
    return {"losses": there[0], "losses_equal": here[0] == there[0], "weights_equal": here[1] == there[1]}


class Loss:
    """Kills a machine in the middle of a step, once, and notes when what happened."""

    def __init__(self, machines: Machines, machine: int) -> None:
        self._machines, self._machine = machines, machine
        self.groups: list[RankGroupTrainer] = []
        self.times_s: dict[str, float] = {}

    def note(self, what: str) -> None:
        """Notes the time of something that happens after the loss, the first time."""
        if self.groups and "killed" in self.times_s:
            self.times_s.setdefault(what, time.perf_counter())

    async def open(self, setup: TrainerSetup, cluster: Cluster) -> Trainer:
        """Opens a group; the first one loses a machine."""
        self.note("restarting")
        group = await RankGroupTrainer.open(setup, GroupOptions(cluster=cluster))
        self.note("restarted")
        self.groups.append(group)
        return _Mortal(group, self) if len(self.groups) == 1 else group

    async def kill_within(self, step: asyncio.Task[Any]) -> None:
        """Kills the machine while a step is taken."""
        await asyncio.sleep(0.01)
        assert not step.done(), "the step is longer than this"
        self.times_s["killed"] = time.perf_counter()
        self._machines.kill(self._machine)


class _Mortal:
    def __init__(self, group: RankGroupTrainer, loss: Loss) -> None:
        self._group, self._loss, self._calls = group, loss, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    async def train(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls != LOST_AT:
            return await self._group.train(*args, **kwargs)
        step = asyncio.create_task(self._group.train(*args, **kwargs))
        await self._loss.kill_within(step)
        return await step


def books(folder: Path, delivered: list[str]) -> Figures:
    """Counts what was lost and what was trained on twice, from what the queue delivered and the run wrote down."""
    lines, delivered = read_consumed(folder), [group for group in delivered if group.startswith("train/")]
    consumed = Counter(f"train/{line['group']}" for line in lines)
    trained = Counter(rollout for line in lines for rollout in line["trained"])
    skipped = [group for group in delivered[: len(lines)] if group not in consumed]
    return {
        "groups_delivered": len(delivered),
        "groups_consumed": len(lines),
        "rows_trained": sum(trained.values()),
        "groups_lost": len(skipped),
        "groups_twice": sum(count - 1 for count in consumed.values()) + len(delivered) - len(set(delivered)),
        "rows_twice": sum(count - 1 for count in trained.values()),
        "steps_without_rows": STEPS - len({line["step"] for line in lines}),
    }


async def loss(machines: Machines, count: int, folder: Path) -> Figures:
    """Loses a machine in the middle of a run, to which one more has joined; returns what that cost."""
    world, lost = made_world(), Loss(machines, machine=0)
    model = small_model(folder / "model", hidden=16, layers=1)
    draft = grpo_draft_of(model)
    parallel = {"kind": "ddp", "ranks": count * RANKS_EACH, "cluster": CLUSTER}
    changes = {"parallel": parallel, "steps": STEPS, "prompts_per_step": 4, "checkpoint_every": 1}
    draft = replace(draft, settings_json=json.dumps({**json.loads(draft.settings_json), **changes}))
    run = await created(draft, world, clusters=[CLUSTER])
    async with AsyncExitStack() as stack:
        doors: list[Door] = []

        async def open_trainer(setup: TrainerSetup, _: Notify) -> Trainer:
            return await lost.open(setup, doors[0].cluster)

        service = service_at(folder / "state", world, open_trainer)
        service.runs.add(run)
        opened = door_of(service.runs, run, host=SERVICE, silence_s=SILENCE_S, start_deadline_s=START_DEADLINE_S)
        doors.append(await stack.enter_async_context(opened))
        await joined(doors[0], machines, count + 1)
        entry, finished = service.runs.entry(run.name), []

        async def watch() -> None:
            async for event in entry.events.follow(0):
                if event.notice is not None and "resumes from its newest checkpoint" in event.notice.message:
                    lost.note("noticed")
                if event.step is not None and event.step.step:
                    finished.append(event.step.step)
                    if "restarted" in lost.times_s:
                        lost.note("next_step")

        watching = asyncio.create_task(watch())
        await live(service, run, world.crashes, limit_s=RUN_LIMIT_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    killed_s = lost.times_s.pop("killed")
    seconds = {what: at_s - killed_s for what, at_s in lost.times_s.items()}
    return {"seconds_after_the_kill": seconds, **books(run_folder(folder), [group.group_id for group in world.feed])}


async def measured(count: int) -> Figures:
    """Measures both."""
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder, Machines(count + 1) as machines:
        (Path(folder) / "equal").mkdir()
        found = await equality(machines, count, Path(folder) / "equal")
        (Path(folder) / "lost").mkdir()
        return {"equality": found, "loss": await loss(machines, count, Path(folder) / "lost")}


def claims_of(raw: Mapping[str, Any]) -> list[outcome.Claim]:
    """Returns what the figures say."""
    equal, lost = raw["equality"], raw["loss"]
    return [
        outcome.claim(
            "losses and weights equal those of one machine, bit for bit (1: yes)",
            float(equal["losses_equal"] and equal["weights_equal"]),
            "",
            goal=1.0,
            better="higher",
        ),
        outcome.claim(
            "a machine killed: until the next finished step",
            lost["seconds_after_the_kill"]["next_step"],
            "s",
            goal=GOAL_S,
            better="lower",
        ),
        outcome.claim("groups lost", float(lost["groups_lost"]), "", goal=0.0, better="lower"),
        outcome.claim(
            "groups or rows trained on twice",
            float(lost["groups_twice"] + lost["rows_twice"]),
            "",
            goal=0.0,
            better="lower",
        ),
    ]


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=4, help="machines of two ranks each")
    parser.add_argument("--output", type=Path, default=outcome.FOLDER, help="folder of the results")
    options = parser.parse_args()
    if not AVAILABLE:
        parser.exit(2, "Needs Linux, root, ip and nsenter.\n")
    raw = asyncio.run(measured(options.machines))
    claims = claims_of(raw)
    method = f"""{options.machines} network namespaces with {RANKS_EACH} ranks each that joined (`fulmen-rank`), one more in
        reserve; the codec none; silence {SILENCE_S:g} s; every process of a machine is killed in the middle of step {LOST_AT}."""
    outcome.save(NAME, method=method, raw=raw, claims=claims, folder=options.output)
    outcome.show(None, claims)


if __name__ == "__main__":
    main()
