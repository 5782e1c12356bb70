"""Executes a run: opens its connections and trainer, restores its checkpoint, and runs its algorithm."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fulmen.errors import FulmenError
from fulmen_algorithm.persistence.checkpoints import CheckpointStore
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.policy.first_weights import WeightSources, first_weights
from fulmen_algorithm.policy.model_roots import ANY_FOLDER, ModelRoots
from fulmen_algorithm.policy.policy import Policy, PublishSettings
from fulmen_algorithm.policy.served_version import served_version
from fulmen_algorithm.policy.services import RunServices
from fulmen_algorithm.policy.stored_weights import REWARD_MODEL, reward_model_folder
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.rollouts.feed import Rollouts
from fulmen_algorithm.runs.algorithm import Algorithm, AlgorithmEntry, AlgorithmSettings, Registry, RunSettings
from fulmen_algorithm.runs.collapse import NoCollapse
from fulmen_algorithm.runs.context import OnNoSignal, RunContext, RunInputs
from fulmen_algorithm.runs.control import Interrupted, RunControl
from fulmen_algorithm.runs.creation.model_defaults import chosen, doubts, model_facts
from fulmen_algorithm.runs.creation.replay_problems import model_problem, replays
from fulmen_algorithm.runs.creation.rules import parse_settings, read_inputs
from fulmen_algorithm.runs.creation.starting_point import StartingPoint, starting_point
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.failure import RunFailed, TrainerLost
from fulmen_algorithm.runs.ports import (
    BaseModels,
    ChatModels,
    EngineCount,
    Notify,
    ResourceStore,
    RolloutQueue,
    RunFence,
    Serving,
)
from fulmen_algorithm.runs.provenance import BASE, PARAMETERS, provenance
from fulmen_algorithm.runs.recorder import Recorder, RecorderSettings
from fulmen_algorithm.runs.run import PolicyOrigin, TrainingRun
from fulmen_algorithm.runs.storage_wait import wait_for_storage
from fulmen_algorithm.training.files import is_storage_trouble
from fulmen_algorithm.training.settings import OptimizerSettings, Schedule

CLEAN_UP_DEADLINE_S = 30.0
MAX_TRAINERS_LOST = 3
"""Consecutive trainer losses without a step in between before the run fails."""


class Connections(Protocol):
    """Opens a run's connections to other services and its trainer; `notify` reports outages."""

    def queue(self, run: TrainingRun, settings: RunSettings, notify: Notify, *, fence: RunFence) -> RolloutQueue:
        """Returns the queue and feed of a run, under an epoch of its lease."""

    def resources(self, project: str, notify: Notify, *, fence: RunFence | None = None) -> ResourceStore:
        """Returns the resources of a project; with a fence, those of a run under an epoch of its lease."""

    def serving(self, run: TrainingRun, settings: RunSettings, notify: Notify) -> Serving:
        """Returns the engine and the route of a run's policy."""

    def engines(self, run: TrainingRun) -> EngineCount:
        """Returns how many engines a run has in this service."""

    def hand_over(self, run: TrainingRun) -> None:
        """Leaves the policy of a run to another service, which runs it now."""

    def chat(self, project: str, notify: Notify) -> ChatModels:
        """Returns the models that algorithms call for a project."""

    async def open_trainer(self, setup: TrainerSetup, notify: Notify) -> Trainer:
        """Opens a trainer; `notify` reports ranks that are lost or return.

        Raises:
            RunFailed: if the folder holds no model with tokenizer.
        """

    async def placed(self, run: TrainingRun, settings: RunSettings, notify: Notify, *, trains: bool) -> RunSettings:
        """Plans the placement of a run's trainer and engines, and reports it.

        Returns:
            Its settings, which then name the GPUs of this machine that it holds until `leave`.

        Raises:
            RunFailed: with every reason, if they do not fit.
        """

    def leave(self, run: TrainingRun) -> None:
        """Gives up what a run holds by `placed`."""

    async def build_model(self, bundle: bytes, target: str, files: RunFiles, *, seed: int) -> None:
        """Runs `file.py:function` of a bundle, which writes the first weights to the folder `files.initial`.

        Raises:
            RunFailed: if the function fails or takes too long.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Execution:
    """One execution of a run: its settings and its connections."""

    entry: Entry
    settings: Any  # those of its algorithm
    resources: ResourceStore
    queue: RolloutQueue
    serving: Serving
    beside: Serving
    control: RunControl


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExecutor:
    """Executes runs; see `worker.Executor`."""

    registry: Registry
    connections: Connections
    keep_checkpoints: int
    keep_models: int
    machine: Mapping[str, str]
    """Facts about the machine that are recorded with each run, such as `device`."""
    check_owned: Callable[[Entry], Awaitable[None]]
    """Raises RunLeaseLost if another service has taken a run over."""
    model_roots: ModelRoots = ANY_FOLDER
    models: BaseModels | None = None
    """Models that runs may begin with."""
    on_no_signal: OnNoSignal = "notice"
    """What runs do by default whose rewards never differ within a group."""

    async def execute(self, entry: Entry, control: RunControl) -> None:
        """Runs or resumes a run to its end, reopening a lost trainer; see `worker.Executor`."""
        lost, furthest = 0, entry.run.step
        while True:
            try:
                await self._resume(entry, control)
            except TrainerLost as error:
                step = entry.run.step
                lost, furthest = (1, step) if step > furthest else (lost + 1, furthest)
                if lost == MAX_TRAINERS_LOST:
                    raise RunFailed(
                        f"{error.message} {lost} trainers were lost without a completed step between them."
                    ) from error
                entry.events.notify("warning", f"{error.message} The run resumes from its newest checkpoint.")
                control.check()
            except OSError as error:
                if not is_storage_trouble(error):
                    raise
                await control.unless_stopped(wait_for_storage(entry, error))
            else:
                return

    async def _resume(self, entry: Entry, control: RunControl) -> None:
        """Runs from the newest checkpoint until the run ends or its trainer is lost."""
        started = time.monotonic()
        run, notify = entry.run, entry.events.notify
        algorithm = self.registry.get(run.algorithm)
        if algorithm is None:
            raise RunFailed(f"This service no longer has algorithm {run.algorithm!r}.")
        settings = parse_settings(algorithm, run.settings_json)
        try:
            settings = await control.unless_stopped(
                self.connections.placed(run, settings, notify, trains=algorithm.trains)
            )
            await self._resume_placed(entry, control, algorithm, settings, started)
        finally:
            self.connections.leave(run)

    async def _resume_placed(
        self, entry: Entry, control: RunControl, algorithm: AlgorithmEntry[Any], settings: Any, started: float
    ) -> None:
        run, notify = entry.run, entry.events.notify
        execution = _Execution(
            entry=entry,
            settings=settings,
            resources=self.connections.resources(run.project, notify, fence=entry.fence),
            queue=self.connections.queue(run, settings, notify, fence=entry.fence),
            serving=self.connections.serving(run, settings, notify),
            beside=self.connections.serving(run, settings, notify),
            control=control,
        )
        checkpoints = entry.files.checkpoint_store(keep=self.keep_checkpoints)
        recorder = self._recorder(execution, checkpoints)
        inputs, problems = await control.unless_stopped(read_inputs(run.inputs, execution.resources))
        if problems:
            raise RunFailed(f"{problems[0].field}: {problems[0].description}")
        start = await control.unless_stopped(asyncio.to_thread(starting_point, checkpoints, run.branch_points))
        model, base = await self._model_to_train(execution, start, trains=algorithm.trains)
        if model is not None:
            settings = await control.unless_stopped(asyncio.to_thread(self._fitted, entry, settings, model))
            execution = replace(execution, settings=settings)
            passes = settings.compute.passes.described
            notify("info", f"Starting the trainer and loading the model{f', with {passes}' if passes else ''}.")
        trainer = await self._open_trainer(model, execution) if model is not None else None
        try:
            await recorder.recover(
                trainer,
                start,
                branch_points=run.branch_points,
                discard=(lambda: control.unless_stopped(execution.queue.cancel_all())) if run.uses_rollouts else None,
            )
            entry.update(step=recorder.progress.step)
            # A run that was killed while it paused has done the step.
            recorder.pause_if_due()
            recorder.spend("start", time.monotonic() - started)
            context = await self._context(execution, inputs, recorder, trainer, base)
            await self._run(context, algorithm.make(settings), uses_rollouts=run.uses_rollouts)
        finally:
            execution.serving.release()
            execution.beside.release()
            if trainer is not None:
                await trainer.close()

    def _recorder(self, execution: _Execution, checkpoints: CheckpointStore) -> Recorder:
        settings = execution.settings
        return Recorder(
            entry=execution.entry,
            checkpoints=checkpoints,
            control=execution.control,
            check_owned=partial(self.check_owned, execution.entry),
            settings=RecorderSettings(
                steps=settings.steps,
                checkpoint_every=settings.checkpoint_every,
                collapse=settings.collapse if isinstance(settings, AlgorithmSettings) else NoCollapse(),
                collapses=execution.entry.run.collapses,
                write_behind=isinstance(settings, AlgorithmSettings) and settings.write_behind,
            ),
        )

    async def _model_to_train(
        self, execution: _Execution, start: StartingPoint, *, trains: bool
    ) -> tuple[Path | None, Path | None]:
        """Returns the model folder from which the run resumes, and the base model of its adapters.

        For a checkpoint only the architecture matters: its state is read once the trainer is open.
        """
        entry, control, settings = execution.entry, execution.control, execution.settings
        run = entry.run
        model = start.checkpoint.model_dir if trains and start.checkpoint is not None else None
        if trains and model is None:
            if run.policy.origin is PolicyOrigin.BUILD and not run.provenance:
                entry.events.notify("info", f"Building the first weights with {run.policy.source}.")
            model = await control.unless_stopped(self._first_weights(execution))
        if not run.provenance:
            made_with = provenance(run, resources=execution.resources, first_weights=model, machine=self.machine)
            try:
                entry.update(provenance=await control.unless_stopped(made_with))
            except FileNotFoundError as error:
                raise RunFailed(f"The folder {model} contains no model with weights.") from error
        if model is None or settings.lora is None:
            return model, None
        # Adapters are valid only with the exact weights that they were trained on.
        base = await self._kept_reference(entry, model)
        return base, base

    async def _kept_reference(self, entry: Entry, model: Path) -> Path:
        await entry.files.fetched(entry.files.folder / "reference")
        kept = await asyncio.to_thread(entry.files.keep_reference, model)
        await entry.files.push_folder(kept)
        return kept

    async def _context(
        self, execution: _Execution, inputs: RunInputs, recorder: Recorder, trainer: Trainer | None, base: Path | None
    ) -> RunContext:
        """Builds the context of the algorithm."""
        entry, control = execution.entry, execution.control
        services = RunServices(
            entry=entry,
            recorder=recorder,
            control=control,
            resources=execution.resources,
            serving=execution.serving,
            beside=execution.beside,
        )
        policy, served = None, None
        if trainer is not None:
            publishing = PublishSettings(
                keep_models=self.keep_models,
                weights=execution.settings.weights,
                lora=execution.settings.lora,
                base_model=base,
                optimizer_steps_per_step=execution.settings.optimizer_steps_per_step,
                purpose=REWARD_MODEL if execution.settings.makes_reward_model else "",
            )
            policy = Policy(services, trainer, publishing)
        else:
            served = await served_version(services, self.model_roots)
        return RunContext(
            run=entry.run,
            inputs=inputs,
            rollouts=Rollouts(queue=execution.queue, control=control),
            trained=policy,
            served=served,
            chat=self.connections.chat(entry.run.project, entry.events.notify),
            resources=execution.resources,
            recorder=recorder,
            control=control,
            notify=entry.events.notify,
            on_no_signal=self.on_no_signal,
        )

    def _fitted(self, entry: Entry, settings: AlgorithmSettings, model: Path) -> AlgorithmSettings:
        """Returns the settings with all that depends on the model; reports what was chosen and what is doubtful. Blocks.

        Raises:
            RunFailed: if the model cannot be trained with them.
        """
        if replays(settings) and (problem := model_problem(model)):
            raise RunFailed(f"engine.router_replay: {problem}.")
        facts = model_facts(model, int(entry.run.provenance.get(PARAMETERS, "0")))
        if not entry.run.step:
            for text in chosen(settings, facts):
                entry.events.notify("info", text)
            for text in doubts(settings, facts, device=self.machine.get("device", "cpu")):
                entry.events.notify("warning", text)
        return settings.for_model(facts)

    async def _open_trainer(self, model: Path, execution: _Execution) -> Trainer:
        entry, settings = execution.entry, execution.settings
        reference = await self._kept_reference(entry, model) if settings.uses_reference else None
        optimizer = OptimizerSettings(
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            rule=settings.optimizer,
            schedule=Schedule(settings.schedule),
            warmup_steps=settings.warmup_steps,
            total_steps=settings.optimizer_steps,
        )
        return await self.connections.open_trainer(
            TrainerSetup(
                model_dir=model,
                run_dir=entry.files.folder,
                optimizer=optimizer,
                seed=settings.seed,
                compute=settings.compute,
                critic=settings.critic_plan,
                reference_dir=reference,
                reward_dir=await self._reward_model(execution) if settings.scored_by else None,
                lora=settings.lora,
                exchange=settings.exchange,
                training_run=entry.run.name,
                project=entry.run.project,
            ),
            entry.events.notify,
        )

    async def _reward_model(self, execution: _Execution) -> Path:
        """Returns the folder of the reward model that scores the run's rollouts.

        Raises:
            RunFailed: if it was deleted or is not a reward model.
        """
        return await execution.control.unless_stopped(
            reward_model_folder(
                execution.settings.scored_by,
                resources=execution.resources,
                files=execution.entry.files,
                roots=self.model_roots,
            )
        )

    async def cancel_rollouts(self, entry: Entry) -> None:
        """Cancels the run's remaining rollouts; see `worker.Executor`."""
        run, notify = entry.run, entry.events.notify
        if not run.uses_rollouts:
            return
        # Default settings: the run's own may be why it failed.
        queue = self.connections.queue(run, RunSettings(), notify, fence=entry.fence)
        try:
            async with asyncio.timeout(CLEAN_UP_DEADLINE_S):
                await queue.cancel_all()
        except (FulmenError, OSError) as error:  # a TimeoutError is one
            reason = error.message if isinstance(error, FulmenError) else "it did not answer"
            notify("warning", f"Rollouts of this run may be left in the store's queue: {reason}")

    def hand_over(self, entry: Entry) -> None:
        """Leaves the policy of a run to another service, which runs it now; see `worker.Executor`."""
        self.connections.hand_over(entry.run)

    async def _run(self, context: RunContext, algorithm: Algorithm, *, uses_rollouts: bool) -> None:
        """Runs the algorithm and follows the feed; writes a checkpoint when interrupted."""
        feed: asyncio.Task[None] | None = None
        behind = [context.recorder.behind, *([context.trained.behind] if context.trained is not None else [])]
        try:
            if uses_rollouts:
                await context.control.unless_stopped(context.rollouts.recover(context.progress))
                feed = asyncio.create_task(context.rollouts.follow(context.progress), name="feed")
            await algorithm.run(context)
            await context.recorder.checkpoint()
        except Interrupted:
            await context.recorder.checkpoint()
            raise
        except asyncio.CancelledError:
            for work in behind:
                work.cancel()
            raise
        finally:
            if feed is not None:
                feed.cancel()
                await asyncio.wait({feed})
            # Nothing may be written behind a trainer that closes.
            for work in behind:
                await work.settle()

    async def _first_weights(self, execution: _Execution) -> Path:
        """Returns the initial model folder.

        Raises:
            RunFailed: if they do not exist.
        """
        run, files, resources = execution.entry.run, execution.entry.files, execution.resources
        if run.policy.origin is PolicyOrigin.BUILD:
            bundle = await resources.get(run.inputs["bundle"])
            seed = execution.settings.seed
            await self.connections.build_model(bundle.data, run.policy.source, files, seed=seed)
            return files.initial
        policy = run.policy
        if policy.origin is PolicyOrigin.BASE:
            # What "main" or an alias meant when the run first started.
            policy = replace(policy, source=run.provenance.get(BASE) or policy.source)
        sources = WeightSources(
            resources=resources, roots=self.model_roots, models=self.models, notify=execution.entry.events.notify
        )
        return await first_weights(policy, files=files, sources=sources)
