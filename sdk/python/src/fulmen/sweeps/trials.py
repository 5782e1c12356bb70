"""The runs of a sweep at the services: named by sweep and trial, and tagged with the sweep's digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import TrainingRunNotFound
from fulmen.rpc.services import Services
from fulmen.sweeps.file import Sweep
from fulmen.train_toml.reader import ConfigError
from fulmen.train_toml.train import PolicyConfig, TrainConfig, with_overrides
from fulmen.training.bundle import Bundle
from fulmen.training.following import follow_run
from fulmen.training.plan import RunNames
from fulmen.training.task_files import Dataset
from fulmen.training.training import Training

__all__ = ["Trials", "metric_of", "trial_config", "trial_configs"]

DIGEST_CHARACTERS: Final = 16


def trial_config(plan: TrainConfig, sweep: Sweep, settings: Mapping[str, Any], steps: int) -> TrainConfig:
    """Returns the training of a trial.

    Raises:
        ConfigError: if a setting names an algorithm that no stage has.
    """
    given = {**settings, sweep.steps_setting: steps}
    return with_overrides(plan, [f"{key}={_toml(value)}" for key, value in given.items()])


def trial_configs(plan: TrainConfig, sweep: Sweep) -> list[TrainConfig]:
    """Returns the trainings of all trials with the steps of their first and last rung.

    Raises:
        ConfigError: with every problem of the sweep as a whole.
    """
    problems: list[str] = []
    if plan.policy.name and plan.policy == PolicyConfig(name=plan.policy.name):
        problems.append(
            "policy: needs base, build, path or version: each trial must begin with the same weights, not with the weights of "
            "the previous trial"
        )
    stages = {stage.algorithm for stage in plan.stages}
    problems += [
        f'"{key}": no stage of {plan.file.name} has the algorithm {key.partition(".")[0]!r}'
        for key in (*sweep.search, sweep.steps_setting)
        if key.partition(".")[0] not in stages
    ]
    if problems:
        raise ConfigError(f"{sweep.file} is not valid; nothing was created.", problems)
    steps = sorted({sweep.rungs[0][1], sweep.rungs[-1][1]})
    return [trial_config(plan, sweep, settings, each) for settings in sweep.settings() for each in steps]


def metric_of(results: Mapping[str, float], metric: str) -> tuple[float | None, str]:
    """Returns a result of a run; None, and why, if it cannot be compared: infinity would always be the best or the
    worst."""
    found = results.get(metric)
    if found is None:
        return None, f"has no {metric}, only {', '.join(sorted(results)) or 'no results'}"
    return (found, "") if math.isfinite(found) else (None, f"its {metric} is {found}")


def _toml(value: Any) -> str:
    """Renders a JSON value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # Escapes of TOML name characters; those of JSON are halves of one beyond U+FFFF.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(slots=True, kw_only=True)
class Trials:
    """Creates and follows the runs of a sweep; see `fulmen.sweeps.halving.SweepRuns`.

    Attributes:
        services: The services.
        project: `projects/{project}`.
        sweep: The sweep.
        plan: The training that is varied.
        bundle: The agent's files.
        datasets: The data by use.
        inputs: Inputs that the training names but does not publish, such as scores.
        tell: Called with a line about each run that begins or ends.
    """

    services: Services
    project: str
    sweep: Sweep
    plan: TrainConfig
    bundle: Bundle
    datasets: dict[str, Dataset]
    inputs: dict[str, str] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda line: None
    _first: Training | None = field(default=None, init=False)
    _settings: list[dict[str, Any]] = field(default_factory=list, init=False)
    _digest: str = field(default="", init=False)

    async def begin(self) -> None:
        """Validates all trials, publishes the inputs once, and validates all trials with them.

        Raises:
            ConfigError: with every problem of every trial, each once; no run was created.
        """
        first = Training(
            services=self.services,
            config=self.plan,
            bundle=self.bundle,
            datasets=self.datasets,
            names=RunNames(project=self.project, prefix=self.sweep.name),
            inputs=self.inputs,
        )
        configs = trial_configs(self.plan, self.sweep)
        await first.learn_algorithms()
        await self._validate(first, configs)
        await first.publish_inputs()
        await self._validate(first, configs)
        self._first, self._settings, self._digest = first, self.sweep.settings(), self.digest

    async def _validate(self, first: Training, configs: list[TrainConfig]) -> None:
        problems: dict[str, None] = {}
        for config in configs:
            problems |= dict.fromkeys(await replace(first, config=config).problems())
        if problems:
            raise ConfigError(f"{self.sweep.file} is not valid; no run was created.", problems)

    async def create(self, trial: int, rung: int, steps: int) -> str:
        """See `SweepRuns`.

        Raises:
            ConfigError: if a run of this name exists that another sweep has created.
        """
        assert self._first is not None, "call begin() first"
        settings, most = self._settings[trial], self.sweep.max_steps
        config = trial_config(self.plan, self.sweep, settings, most if self._continues else steps)
        tags: tuple[str, ...] = (f"sweep.{self.sweep.name}", f"trial.{trial}", f"sweep-digest.{self._digest}")
        prefix = f"{self.sweep.name}-t{trial}"
        if not self._continues:
            tags, prefix = (*tags, f"rung.{rung}"), f"{prefix}-r{rung}"
        names = RunNames(project=self.project, prefix=prefix)
        pause = steps if self._continues and steps < most else 0
        training = replace(self._first, config=config, names=names, tags=tags, pause_at_step=pause)
        stages = [names.of(number, stage) for number, stage in enumerate(config.stages, start=1)]
        shown = ", ".join(f"{key} = {value}" for key, value in settings.items())
        # The stages of a training are created together or not at all.
        if (known := await self._found(stages[-1])) is None:
            await training.create()
            self.tell(f"trial {trial}, {steps} steps: {shown}")
        elif f"sweep-digest.{self._digest}" not in known.tags:
            raise ConfigError(
                f"{self.sweep.file} cannot continue.",
                [
                    f"name: the run {known.name} belongs to a sweep {self.sweep.name} with other settings, data or agent; choose another name"
                ],
            )
        elif self._rests_before(known, steps):
            request = training_run_service_pb2.ResumeTrainingRunRequest(name=known.name, pause_at_step=pause)
            await self.services.training_runs.ResumeTrainingRun(request)
            self.tell(f"trial {trial}, to {steps} steps: {shown}")
        return stages[-1]

    @staticmethod
    def _rests_before(run: training_run_pb2.TrainingRun, steps: int) -> bool:
        """Returns whether a run is paused at the end of an earlier rung; a run that a person has paused stops
        elsewhere."""
        paused = run.state == training_run_pb2.TRAINING_RUN_STATE_PAUSED
        return paused and 0 < run.pause_at_step < steps and run.step >= run.pause_at_step

    @property
    def _continues(self) -> bool:
        """True if runs continue from rung to rung: if the last stage's steps are the resource, and it trains
        weights."""
        algorithm, _, setting = self.sweep.steps_setting.partition(".")
        own = [stage.algorithm for stage in self.plan.stages]
        assert self._first is not None, "call begin() first"
        return setting == "steps" and own.index(algorithm) == len(own) - 1 and self._first.trains(algorithm)

    async def end(self, run: str) -> None:
        """See `SweepRuns`."""
        await self.services.training_runs.CancelTrainingRun(training_run_service_pb2.CancelTrainingRunRequest(name=run))

    async def value(self, run: str, steps: int) -> tuple[float | None, str]:
        """See `SweepRuns`."""
        value, why = await self._reached(run, steps)
        self.tell(f"{run.rpartition('/')[2]}: {f'{value:.4g}' if value is not None else why}")
        return value, why

    async def _reached(self, run: str, steps: int) -> tuple[float | None, str]:
        """Follows the events of a run from its beginning, so that its results at an earlier rung are found again."""
        at = training_run_pb2.TrainingRun(name=run)
        async with aclosing(follow_run(self.services, run, on_interruption=lambda _: None)) as events:
            async for event in events:
                at = event.run if event.HasField("run") else at
                if at.state == training_run_pb2.TRAINING_RUN_STATE_PAUSED and at.step >= steps == at.pause_at_step:
                    return metric_of(at.results, self.sweep.metric)
        if at.state == training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED:
            return metric_of(at.results, self.sweep.metric)
        state = training_run_pb2.TrainingRunState.Name(at.state).removeprefix("TRAINING_RUN_STATE_").lower()
        return None, f"{state}: {at.failure_message}".removesuffix(": ")

    @property
    def digest(self) -> str:
        """Digest of the sweep's settings, data and agent, so that a continued sweep does not mix runs of different
        ones."""
        plan = self.plan
        parts = [
            {key: value for key, value in asdict(self.sweep).items() if key not in ("file", "train")},
            [[stage.algorithm, dict(stage.settings)] for stage in plan.stages],
            asdict(plan.policy),
            hashlib.sha256(self.bundle.content).hexdigest(),
            {use: each.sha256.hex() for use, each in self.datasets.items()},
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:DIGEST_CHARACTERS]

    async def _found(self, name: str) -> training_run_pb2.TrainingRun | None:
        request = training_run_service_pb2.GetTrainingRunRequest(name=name)
        try:
            return (await self.services.training_runs.GetTrainingRun(request)).training_run
        except TrainingRunNotFound:
            return None
