"""Trains an example in one process, stage after stage, and prints its curve: no service, no socket.

    python -m benchmarks.train.learning calculator --seeds 0 1 2
    python -m benchmarks.train.learning arithmetic --algorithm rloo --set 'loss={ kind = "clip", low = 0.1 }'

The weights after the first stage are kept in `--cache` by example, settings and seed, so that experiments with the
second begin at once. Prints one JSON object per line: each report of a stage, then the result of a seed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.train.stand import say
from benchmarks.train.world import Agent, Engine, Queue, Resources, load_script
from fulmen.train_toml.train import StageConfig, TrainConfig, load_train_config
from fulmen_algorithm import tiny_model
from fulmen_algorithm.algorithms.registry import load_registry
from fulmen_algorithm.algorithms.sampling import measuring_overrides
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.rollouts.groups import GroupSpec, Mode
from fulmen_algorithm.runs.algorithm import RunSettings
from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.creation.rules import CreationRules, RunDraft
from fulmen_algorithm.runs.creation.stages import checked_runs
from fulmen_algorithm.runs.entry import Entry, EventLog
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.execution import RunExecutor
from fulmen_algorithm.runs.ports import ChatAnswer, ChatRequest, EngineCount, Notify, PublishedPolicy, RunFence
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState, TrainingRun
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CACHE = ROOT / ".fulmen" / "bench-models"
SLOTS = 256
SAID_EVERY = 100
SAID = ("notice", "step", "validation_accuracy", "reward_mean", "loss")
SHOWN = ("validation_accuracy", "validation_role_planner_reward", "validation_role_solver_reward", "reward_mean", "loss", "groups_trained", "groups_no_variance", "groups_too_few_usable", "groups_too_stale", "rows_stale", "grad_norm", "entropy", "clipped_share",
         "rollouts_per_second")  # fmt: skip


Report = Callable[[Mapping[str, object]], None]
"""Takes in what a stage reports: a step with some of its metrics, or a notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of one seed.

    Attributes:
        before: Validation accuracy before the last stage, 0 to 1.
        after: After it.
        best: The best in between.
        sft_loss: Loss at the end of the first stage.
        seconds: Wall time of the stages that were run, by algorithm.
        cpu_s: CPU time of all of them.
        curve: Training step, seconds since the stage began, and validation accuracy.
        calls_per_row: Model calls that one training row holds on average.
    """

    seed: int
    before: float
    after: float
    best: float
    sft_loss: float
    seconds: Mapping[str, float]
    cpu_s: float
    curve: Sequence[tuple[int, float, float]]
    calls_per_row: float


class Process:
    """The inside of the algorithm service over an in-process world."""

    def __init__(self, config: TrainConfig, folder: Path, *, slots: int) -> None:
        if config.agent is None:
            raise ValueError(f"{config.file} names no agent.")
        self.config = config
        self._state = RunStorage(folder)
        self._slots = slots
        self.engine = Engine()
        self.resources = Resources()
        self.queue = Queue(Agent.load(config.folder, self.engine, target=config.agent.python), slots=slots)
        self.thread = TorchThread(torch_threads=1)
        self._registry = load_registry()
        data = {"train_tasks": config.data.train, "validation_tasks": config.data.validation}
        data["demonstrations"] = config.data.demonstrations
        self._test_tasks = config.data.test.read_bytes().splitlines() if config.data.test else []
        self._inputs = {
            use: self.resources.put(f"resources/dataset.{use}", path.read_bytes()) for use, path in data.items() if path
        } | {"agent": self.resources.put("resources/agent.example", b"agent")}

    async def stage(
        self, stage: StageConfig, name: str, policy: PolicySpec, *, report: Report
    ) -> tuple[TrainingRun, EventLog]:
        """Runs one stage to its end."""
        entry = self._registry[stage.algorithm]
        uses = (*entry.needs, *entry.any_of, *entry.takes)
        inputs = {use: self._inputs[use] for use in uses if use in self._inputs}
        if policy.origin is PolicyOrigin.BUILD:
            inputs["bundle"] = self.resources.put("resources/bundle.example", b"bundle")
        draft = RunDraft(
            name=f"projects/default/trainingRuns/{name}",
            project="projects/default",
            display_name="",
            algorithm=stage.algorithm,
            settings_json=json.dumps(dict(stage.settings)),
            policy=policy,
            inputs=inputs,
        )
        [run] = await checked_runs(
            [draft], rules=CreationRules(registry=self._registry), resources=self.resources, now=_now()
        )
        with self._state as state:
            runs = RunRegistry(state, clock=_now, max_concurrent=1)
            runs.add(run)
            run = runs.move(run.name, RunState.RUNNING)
            executor = RunExecutor(
                registry=self._registry,
                connections=_Connections(self),
                keep_checkpoints=1,
                keep_models=1,
                machine={},
                check_owned=_owned,
            )
            entry_of = runs.entry(run.name)
            async with self.queue if self._uses_agent(entry) else _Nothing():
                following = asyncio.create_task(_follow(entry_of.events, report))
                try:
                    await executor.execute(entry_of, RunControl())
                finally:
                    following.cancel()
            return runs.entry(run.name).run, entry_of.events

    async def tested(self, model: Path) -> list[float]:
        """Answers each test task once with the weights of a folder, greedily; returns the rewards, in their order."""
        policy = PublishedPolicy(name=f"resources/policy.{self.config.policy.name}/versions/1", version=1, path=model)
        overrides = measuring_overrides(temperature=0.0, max_tokens=None)
        await self.engine.serve(policy, {mode: json.dumps(fields) for mode, fields in overrides.items()}, _unheard)
        groups = [
            GroupSpec(group_id=f"test/{model}/{index}", task=task, size=1, mode=Mode.TEST)
            for index, task in enumerate(self._test_tasks)
        ]
        async with self.queue:
            finished = await self.queue.finished(groups)
        return [group.rollouts[0].reward or 0.0 for group in finished]

    def _uses_agent(self, entry: Any) -> bool:
        return "agent" in entry.needs

    async def close(self) -> None:
        """Ends what it holds."""
        await self.engine.close()
        self.thread.close()


def _unheard(severity: str, text: str) -> None:
    """Drops a notice of an engine."""


async def _owned(entry: Entry) -> None:
    """Returns: no other service takes runs over."""


class _Connections:
    """Connects the runs of a process; see `runs.execution.Connections`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def queue(self, run: TrainingRun, settings: RunSettings, notify: Notify, *, fence: RunFence) -> Queue:
        return self._process.queue

    def resources(self, project: str, notify: Notify, *, fence: RunFence | None = None) -> Resources:
        return self._process.resources

    def serving(self, run: TrainingRun, settings: RunSettings, notify: Notify) -> Engine:
        return self._process.engine

    def engines(self, run: TrainingRun) -> EngineCount:
        return EngineCount()

    def hand_over(self, run: TrainingRun) -> None:
        raise AssertionError("no other service takes runs over")

    def chat(self, project: str, notify: Notify) -> _NoChat:
        return _NoChat()

    async def open_trainer(self, setup: TrainerSetup, notify: Notify) -> Trainer:
        if setup.compute.parallel.kind != "none":
            return await RankGroupTrainer.open(setup, GroupOptions())
        return await InProcessTrainer.open(setup, thread=self._process.thread, device="cpu")

    async def placed(self, run: TrainingRun, settings: RunSettings, notify: Notify, *, trains: bool) -> RunSettings:
        return settings

    def leave(self, run: TrainingRun) -> None:
        pass

    async def build_model(self, bundle: bytes, target: str, files: RunFiles, *, seed: int) -> None:
        file, _, function = target.partition(":")
        getattr(load_script(self._process.config.folder / file), function)(str(files.initial), seed=seed)


class _NoChat:
    async def ask(self, request: ChatRequest) -> ChatAnswer:
        raise NotImplementedError("No algorithm that is measured here asks models itself.")

    async def score(self, model: str, token_ids: Sequence[int]) -> list[float]:
        raise NotImplementedError("No algorithm that is measured here has a teacher behind the proxy.")


class _Nothing:
    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        pass


async def _follow(events: EventLog, report: Report) -> None:
    async for event in events.follow(0):
        if event.step is not None:
            values = {k: round(v, 4) for k, v in event.step.values.items() if k in SHOWN}
            report({"step": event.step.step, **values})
        if event.notice is not None and event.notice.severity != "info":
            report({"notice": event.notice.message})


async def train(config: TrainConfig, *, cache: Path, report: Report, slots: int = SLOTS) -> Trained:
    """Trains one seed."""
    seed = int(config.stages[0].settings.get("seed", 0))
    cpu_started = process_time()
    with tempfile.TemporaryDirectory(prefix="fulmen-learning-") as folder:
        process = Process(config, Path(folder), slots=slots)
        try:
            first, *rest = config.stages
            began = perf_counter()
            model, loss = await first_stage(process, config, first, cache, report=report)
            seconds = {first.algorithm: perf_counter() - began}
            before, after, best, curve = 0.0, 0.0, 0.0, []
            for number, stage in enumerate(rest):
                began = perf_counter()
                policy = PolicySpec(name=config.policy.name, origin=PolicyOrigin.PATH, source=str(model))
                run, events = await process.stage(stage, f"stage-{number + 1}", policy, report=report)
                seconds[stage.algorithm] = perf_counter() - began
                results = run.results
                before, after = results["validation_accuracy_before"], results["validation_accuracy_after"]
                best = results["validation_accuracy_best"]
                curve = await curve_of(events)
            return Trained(
                seed=seed, before=before, after=after, best=best, sft_loss=loss,
                seconds={k: round(v, 1) for k, v in seconds.items()}, cpu_s=round(process_time() - cpu_started, 1),
                curve=curve, calls_per_row=round(process.queue.calls / max(process.queue.rows, 1), 2),
            )  # fmt: skip
        finally:
            await process.close()


async def imitated(config: TrainConfig, *, cache: Path, report: Report) -> Path:
    """Returns the folder of the weights after the first stage; runs it only if the cache does not hold them."""
    with tempfile.TemporaryDirectory(prefix="fulmen-learning-") as folder:
        process = Process(config, Path(folder), slots=SLOTS)
        try:
            model, _ = await first_stage(process, config, config.stages[0], cache, report=report)
            return model
        finally:
            await process.close()


def say_now_and_then(where: str, record: Mapping[str, object]) -> None:
    """Says notices, each validation, and a report of every so many steps."""
    step = int(str(record.get("step", 0)))
    if "notice" in record or "validation_accuracy" in record or step % SAID_EVERY == 0:
        say(f"{where}: " + " ".join(f"{name} {record[name]}" for name in SAID if name in record))


async def first_stage(
    process: Process, config: TrainConfig, stage: StageConfig, cache: Path, *, report: Report
) -> tuple[Path, float]:
    """Runs the first stage, or takes its weights from the cache; returns the model's folder and the loss."""
    kept = cache / _key(config, stage)
    if not (kept / "loss.json").exists():
        policy = PolicySpec(name=config.policy.name, origin=PolicyOrigin.BUILD, source=config.policy.build)
        run, _ = await process.stage(stage, "stage-0", policy, report=report)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(run.model_path, kept)
        (kept / "loss.json").write_text(json.dumps({"loss": run.results["loss"]}))
    return kept, json.loads((kept / "loss.json").read_text())["loss"]


def _key(config: TrainConfig, stage: StageConfig) -> str:
    """Names what decides about the weights after a stage."""
    made_of = [config.policy.build, stage.algorithm, dict(stage.settings)]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode())
    for path in (*sorted(config.folder.glob("*.py")), Path(tiny_model.__file__), config.data.demonstrations):
        digest.update(path.read_bytes() if path else b"")
    return f"{config.name}-{digest.hexdigest()[:12]}"


async def curve_of(events: EventLog) -> list[tuple[int, float, float]]:
    """Returns step, seconds since the beginning and accuracy of each validation so far."""
    told: list[Event] = []
    async for event in events.follow(0):
        told.append(event)
        if event.sequence == events.last_sequence:
            break
    return [
        (e.step.step, round((e.time - told[0].time).total_seconds(), 2), e.step.values["validation_accuracy"])
        for e in told
        if e.step is not None and "validation_accuracy" in e.step.values
    ]


def example(name: str, *, algorithm: str = "", assignments: Sequence[str] = (), seed: int | None = None) -> TrainConfig:
    """Reads an example's training file.

    Args:
        name: Folder of the example, or a training file in it, such as `two_roles/train_adapters.toml`.
        algorithm: Takes the place of the last stage's; its settings stay, unless they are assigned.
        assignments: `setting=value` for the last stage, or `first:setting=value` for the first.
        seed: Of all stages.
    """
    file = EXAMPLES / name
    config = load_train_config(file if file.suffix else file / "train.toml")
    stages = list(config.stages)
    if algorithm:
        stages[-1] = replace(stages[-1], algorithm=algorithm)
    for text in assignments:
        index = 0 if text.startswith("first:") else -1
        setting, _, value = text.removeprefix("first:").partition("=")
        settings = {**stages[index].settings, setting: tomllib.loads(f"value = {value}")["value"]}
        if value == "null":
            settings.pop(setting)
        stages[index] = replace(stages[index], settings=settings)
    if seed is not None:
        stages = [replace(s, settings={**s.settings, "seed": seed}) for s in stages]
    return replace(config, stages=tuple(stages))


def emit(record: Mapping[str, object]) -> None:
    """Prints one record."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def unsaid(record: Mapping[str, object]) -> None:
    """Prints notices alone."""
    if "notice" in record:
        emit(record)


def _now() -> datetime:
    return datetime.now(UTC)


def main() -> None:
    """Runs experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="folder in examples/, or a training file in one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--algorithm", default="", help="in the place of the last stage's")
    parser.add_argument("--set", action="append", default=[], help="setting=value of the last stage; first:... of SFT")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--quiet", action="store_true", help="results only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = unsaid if given.quiet else emit
    for seed in given.seeds:
        config = example(given.example, algorithm=given.algorithm, assignments=given.set, seed=seed)
        result = asyncio.run(train(config, cache=given.cache, report=report, slots=given.slots))
        emit({**{k: getattr(result, k) for k in result.__slots__ if k != "curve"}, "settings": given.set})


if __name__ == "__main__":
    main()
