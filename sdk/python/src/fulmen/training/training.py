"""A training: validated as a whole, its inputs published, and the runs of its stages created together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import ArgumentInvalid, ResourceNotFound, SettingsInvalid, Violation
from fulmen.rpc.services import Services
from fulmen.train_toml.train import ConfigError, TrainConfig
from fulmen.training.bundle import Bundle
from fulmen.training.plan import AGENT_INPUT, RunNames, stage_problem, training_run
from fulmen.training.publish import publish, published_prompt
from fulmen.training.task_files import Dataset

__all__ = ["Training"]

INPUTS_PREFIX: Final = "inputs."
_LATER_STAGE: Final = re.compile(r"next_stages\[(\d+)\]\.(.+)")


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
        inputs: Published inputs by use, and the earlier run that is read; `begin` adds to them.
        tags: Tags of the runs.
        pause_at_step: Step after which the last stage pauses; 0 for none.
    """

    services: Services
    config: TrainConfig
    bundle: Bundle
    datasets: dict[str, Dataset]
    names: RunNames
    inputs: dict[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pause_at_step: int = 0
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
        await self.learn_algorithms()
        await self._validate()
        await self.publish_inputs(show_first)
        await self._validate()

    async def learn_algorithms(self) -> None:
        """Asks the service which inputs its algorithms read."""
        answer = await self.services.training_runs.ListAlgorithms(training_run_service_pb2.ListAlgorithmsRequest())
        self._algorithms = {
            each.name: _Known(
                inputs=(*each.required_inputs, *each.optional_inputs, *each.any_of_inputs), trains=each.trains
            )
            for each in answer.algorithms
        }

    def trains(self, algorithm: str) -> bool:
        """Returns whether an algorithm of the service trains weights; True if that is unknown."""
        return algorithm not in self._algorithms or self._algorithms[algorithm].trains

    async def create(self) -> training_run_pb2.TrainingRun:
        """Creates the runs of all stages; returns the first, whose `stages` names all if there are several."""
        request = self._request()
        request.request_id = request.training_run.name
        return (await self.services.training_runs.CreateTrainingRun(request)).training_run

    async def publish_inputs(self, show_first: Callable[[Bundle], None] = lambda bundle: None) -> None:
        """Publishes what the runs read; see `begin`."""
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
        if found := await self.problems():
            raise ConfigError(f"{self.config.file} is not valid; no run was created.", found)

    async def problems(self) -> list[str]:
        """Returns every problem that the service has with the stages.

        Before the inputs are published, missing ones are not reported.
        """
        request = self._request()
        request.validate_only = True
        try:
            await self.services.training_runs.CreateTrainingRun(request)
        except (ArgumentInvalid, SettingsInvalid) as error:
            return self._problems(error.violations) if error.violations else [error.message]
        except ResourceNotFound as error:
            return [f"There is no {error.metadata.get('resource') or 'such resource'}."]
        return []

    def _problems(self, violations: Sequence[Violation]) -> list[str]:
        found = []
        for each in violations:
            later = _LATER_STAGE.fullmatch(each.field)
            index, field = (int(later[1]) + 1, later[2]) if later else (0, each.field)
            has_none = field == AGENT_INPUT and self.config.agent is None
            use = field.removeprefix(INPUTS_PREFIX).partition(":")[0]
            if self._is_published or has_none or use in self.inputs or not field.startswith(INPUTS_PREFIX):
                found.append(stage_problem(self.config, index, field, each.description))
        return found

    def _request(self) -> training_run_service_pb2.CreateTrainingRunRequest:
        runs: list[training_run_pb2.TrainingRun] = []
        continues = False
        for number, stage in enumerate(self.config.stages, start=1):
            trains = self.trains(stage.algorithm)
            runs.append(
                training_run(
                    self.config,
                    stage,
                    name=self.names.of(number, stage),
                    inputs=self.inputs,
                    read={name: each.inputs for name, each in self._algorithms.items()},
                    continues=continues,
                    trains=trains,
                )
            )
            runs[-1].tags.extend(self.tags)
            continues = continues or trains
        runs[-1].pause_at_step = self.pause_at_step
        return training_run_service_pb2.CreateTrainingRunRequest(training_run=runs[0], next_stages=runs[1:])
