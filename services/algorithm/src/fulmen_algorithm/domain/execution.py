"""Puts the parts of one run together, and carries it out."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulmen.errors import ResourceNotFound
from fulmen_algorithm.domain.algorithm import Algorithm, AlgorithmSettings, Registry
from fulmen_algorithm.domain.context import RunContext
from fulmen_algorithm.domain.control import Interrupted, RunControl
from fulmen_algorithm.domain.creation import parse_settings, read_inputs
from fulmen_algorithm.domain.events import EventLog
from fulmen_algorithm.domain.failure import RunFailed
from fulmen_algorithm.domain.policy import Policy
from fulmen_algorithm.domain.ports import Notify, ResourceShelf, RolloutQueue, RunStorage, Serving
from fulmen_algorithm.domain.recorder import Recorder
from fulmen_algorithm.domain.rollouts import Rollouts
from fulmen_algorithm.domain.run import PolicyOrigin, TrainingRun
from fulmen_algorithm.domain.runs import Runs
from fulmen_algorithm.domain.torch_thread import TorchThread
from fulmen_algorithm.training.checkpoints import CheckpointStore
from fulmen_algorithm.training.policy import OptimizerSettings, PolicyModel, Schedule, seed_everything
from fulmen_algorithm.training.step import TrainingState, make_state

CLEAN_UP_DEADLINE_S = 30.0


class RunFolder(RunStorage, Protocol):
    """The folder of a run."""

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""

    @property
    def initial(self) -> Path:
        """Folder of the model that the run's own script builds."""

    @property
    def bundle(self) -> Path:
        """Folder of the unpacked bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """How a run reaches other services; `notify` of each hears about outages.

    Attributes:
        queue: Makes the queue and feed of a run.
        shelf: Makes the resources of a project.
        serving: The engine and its route.
        build_model: Runs `file.py:function` of a bundle: bundle content, target, bundle folder, output folder, seed.
    """

    queue: Callable[[TrainingRun, AlgorithmSettings, Notify], RolloutQueue]
    shelf: Callable[[str, Notify], ResourceShelf]
    serving: Serving
    build_model: Callable[[bytes, str, Path, Path, int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExecutor:
    """Carries runs out; see `worker.Executor`."""

    registry: Registry
    runs: Runs
    connections: Connections
    open_folder: Callable[[str], RunFolder]
    torch_thread: TorchThread
    device: str
    keep_checkpoints: int
    keep_models: int

    async def execute(self, run: TrainingRun, events: EventLog, control: RunControl) -> None:
        """Goes on with a run to its end; see `worker.Executor`."""
        started = time.monotonic()
        entry = self.registry[run.algorithm]
        settings = parse_settings(entry, run.settings_json)
        folder = self.open_folder(run.run_id)
        shelf = self.connections.shelf(run.project, events.notify)

        def update_run(changes: Mapping[str, object]) -> None:
            self.runs.update(run.name, changes)

        recorder = Recorder(
            storage=folder,
            checkpoints=CheckpointStore(directory=folder.checkpoints, keep=self.keep_checkpoints),
            events=events,
            control=control,
            torch_thread=self.torch_thread,
            update_run=update_run,
            steps=settings.steps,
            checkpoint_every=settings.checkpoint_every,
        )
        inputs, problems = await control.unless_stopped(read_inputs(run.inputs, shelf))
        if problems:
            raise RunFailed(f"{problems[0].field}: {problems[0].description}")
        model = await control.unless_stopped(self._first_weights(run, settings, folder, shelf))
        state = await self.torch_thread.run(_training_state, model, self.device, settings)
        await recorder.recover(state)
        update_run({"step": recorder.progress.step})
        recorder.spend("start", time.monotonic() - started)
        policy = Policy(
            run=run,
            state=state,
            recorder=recorder,
            control=control,
            torch_thread=self.torch_thread,
            resources=shelf,
            storage=folder,
            serving=self.connections.serving,
            notify=events.notify,
            update_run=update_run,
            keep_models=self.keep_models,
        )
        rollouts = Rollouts(queue=self.connections.queue(run, settings, events.notify), control=control)
        context = RunContext(inputs=inputs, rollouts=rollouts, policy=policy, recorder=recorder, notify=events.notify)
        await self._run(context, entry.make(settings), uses_rollouts=run.uses_rollouts)

    async def cancel_rollouts(self, run: TrainingRun, events: EventLog) -> None:
        """Cancels what is left in the queue; see `worker.Executor`."""
        entry = self.registry[run.algorithm]
        if not run.uses_rollouts:
            return
        queue = self.connections.queue(run, parse_settings(entry, run.settings_json), events.notify)
        try:
            async with asyncio.timeout(CLEAN_UP_DEADLINE_S):
                await queue.cancel_all()
        except TimeoutError:
            events.notify("warning", "The store did not answer: rollouts of this run may be left in the queue.")

    async def _run(self, context: RunContext, algorithm: Algorithm, *, uses_rollouts: bool) -> None:
        """Runs the algorithm beside the feed; whatever interrupts it, a checkpoint is written where it stands."""
        feed: asyncio.Task[None] | None = None
        try:
            if uses_rollouts:
                await context.rollouts.recover(context.progress)
                feed = asyncio.create_task(context.rollouts.follow(context.progress), name="feed")
            await algorithm.run(context)
            await context.recorder.checkpoint()
        except Interrupted:
            await context.recorder.checkpoint()
            raise
        finally:
            if feed is not None:
                feed.cancel()
                await asyncio.wait({feed})

    async def _first_weights(
        self, run: TrainingRun, settings: AlgorithmSettings, folder: RunFolder, shelf: ResourceShelf
    ) -> Path:
        """Returns the model folder that the run begins with; with a checkpoint only its architecture matters.

        Raises:
            RunFailed: if there is none.
        """
        saved = await self.torch_thread.run(CheckpointStore(directory=folder.checkpoints).newest)
        if saved.checkpoint is not None:
            return saved.checkpoint.model_dir
        match run.policy.origin:
            case PolicyOrigin.PATH:
                return Path(run.policy.source)
            case PolicyOrigin.BUILD:
                bundle = await shelf.get(run.inputs["bundle"])
                target = run.policy.source
                await self.connections.build_model(bundle.data, target, folder.bundle, folder.initial, settings.seed)
                return folder.initial
            case PolicyOrigin.VERSION | PolicyOrigin.NEWEST:
                name = run.policy.source or f"resources/policy.{run.policy.name}"
                try:
                    content = await shelf.get(name)
                except ResourceNotFound as error:
                    raise RunFailed(f"{name} does not exist.") from error
                return Path(json.loads(content.data)["path"])


def _training_state(model_dir: Path, device: str, settings: AlgorithmSettings) -> TrainingState:
    """Loads the model and builds a fresh optimiser.

    Raises:
        RunFailed: if the folder holds no model with tokenizer.
    """
    seed_everything(settings.seed)
    try:
        policy = PolicyModel.load(model_dir, device=device)
    except (OSError, ValueError) as error:
        raise RunFailed(f"The folder {model_dir} holds no complete model (config, weights and tokenizer).") from error
    optimizer = OptimizerSettings(
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        schedule=Schedule(settings.schedule),
        warmup_steps=settings.warmup_steps,
        total_steps=settings.optimizer_steps,
    )
    return make_state(policy, optimizer)
