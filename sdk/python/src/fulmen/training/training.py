"""A training: validated as a whole, its inputs published, and its stages created as training runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import ArgumentInvalid, SettingsInvalid
from fulmen.rpc.services import Services
from fulmen.train_toml.train import ConfigError, TrainConfig
from fulmen.training.bundle import Bundle
from fulmen.training.plan import RunNames, training_run
from fulmen.training.publish import best_prompt, publish, published_prompt
from fulmen.training.task_files import Dataset

__all__ = ["Training"]

INPUTS_PREFIX: Final = "inputs."
SEARCHES_PROMPTS: Final = "apo"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """An algorithm of the service: the inputs that it reads, and whether it trains weights."""

    inputs: tuple[str, ...]
    trains: bool


@dataclass(slots=True, kw_only=True)
class Training:
    """The stages of one configuration.

    Attributes:
        services: The services.
        config: The configuration.
        bundle: The agent's files.
        datasets: The data by use.
        names: Names of the runs.
        inputs: Published versions by use; `begin` adds to them.
    """

    services: Services
    config: TrainConfig
    bundle: Bundle
    datasets: dict[str, Dataset]
    names: RunNames
    inputs: dict[str, str] = field(default_factory=dict)
    _algorithms: dict[str, _Known] = field(default_factory=dict)
    _is_published: bool = False

    async def begin(self, *, show_first: Callable[[Bundle], None] = lambda bundle: None) -> None:
        """Validates the stages, publishes the inputs, and validates the stages with them.

        Args:
            show_first: called before a bundle of this name is published for the first time.

        Raises:
            ConfigError: with every problem of every stage; no run was created.
            FulmenError: if a service refuses or cannot be reached.
        """
        answer = await self.services.training_runs.ListAlgorithms(training_run_service_pb2.ListAlgorithmsRequest())
        self._algorithms = {
            each.name: _Known(
                inputs=(*each.required_inputs, *each.optional_inputs, *each.any_of_inputs), trains=each.trains
            )
            for each in answer.algorithms
        }
        await self._validate()
        await self._publish(show_first)
        await self._validate()

    async def create(self, number: int, *, start_version: str = "") -> training_run_pb2.TrainingRun:
        """Creates the run of a stage, counted from 1, which starts at the version that the stage before published."""
        run = self._training_run(number, start_version=start_version)
        request = training_run_service_pb2.CreateTrainingRunRequest(training_run=run, request_id=run.name)
        return (await self.services.training_runs.CreateTrainingRun(request)).training_run

    async def take_prompt(self, run: training_run_pb2.TrainingRun) -> None:
        """Passes the best prompt of a search on to the following stages."""
        if run.algorithm == SEARCHES_PROMPTS:
            self.inputs["prompt"] = await best_prompt(self.services, run.inputs["prompt"])

    async def _publish(self, show_first: Callable[[Bundle], None]) -> None:
        config = self.config
        if config.data.rollouts:
            self.inputs["rollouts"] = config.data.rollouts
        published = await publish(
            self.services,
            name=config.name,
            agent=config.agent,
            bundle=self.bundle,
            datasets=self.datasets,
            show_first=show_first,
        )
        self.inputs |= published.inputs
        if config.data.prompt is not None:
            self.inputs["prompt"] = await published_prompt(self.services, config.name, config.data.prompt)
        self._is_published = True

    async def _validate(self) -> None:
        """Validates every stage at the service; the start version of later ones is not known yet.

        Before anything is published, all but the inputs is checked.
        """
        problems: list[str] = []
        for number in range(1, len(self.config.stages) + 1):
            problems += await self._problems(number, self._training_run(number, start_version=""))
        if problems:
            raise ConfigError(f"{self.config.file} is not valid; no run was created.", problems)

    async def _problems(self, number: int, run: training_run_pb2.TrainingRun) -> list[str]:
        try:
            await self.services.training_runs.CreateTrainingRun(
                training_run_service_pb2.CreateTrainingRunRequest(training_run=run, validate_only=True)
            )
        except (ArgumentInvalid, SettingsInvalid) as error:
            where = f"stage {number} ({run.algorithm})"
            if not error.violations:
                return [f"{where}: {error.message}"]
            return [
                f"{where}: {each.field}: {each.description}"
                for each in error.violations
                if self._is_published or not each.field.startswith(INPUTS_PREFIX)
            ]
        return []

    def _training_run(self, number: int, *, start_version: str) -> training_run_pb2.TrainingRun:
        stage = self.config.stages[number - 1]
        return training_run(
            self.config,
            stage,
            name=self.names.of(number, stage),
            inputs=self.inputs,
            read={name: each.inputs for name, each in self._algorithms.items()},
            start_version=start_version,
            trains=stage.algorithm not in self._algorithms or self._algorithms[stage.algorithm].trains,
        )
