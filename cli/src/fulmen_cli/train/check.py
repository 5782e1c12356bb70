"""`fulmen train --check`: checks a train.toml without a stack, its stages by the rules of the algorithm service installed here.

What each stage will take and chooses by its model is shown before anything is created (`train.preflight`).
Where an algorithm service is known, it is asked where the stages would run, and it checks them by the code that creates runs:
what they name must exist.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.algorithm.v1.training_run_service_pb2 import MeasuredSteps, PlanTrainingRunRequest
from fulmen.connection import LocalStackMissing
from fulmen.errors import DeadlineExceeded, FulmenError, Unavailable
from fulmen.rpc.services import Services
from fulmen.train_toml.train import ConfigError, TrainConfig, read_train_config, with_overrides
from fulmen.training.bundle import Bundle, bundle_lines, pack_bundle
from fulmen.training.plan import RunNames, stage_problem, training_run
from fulmen.training.task_files import Dataset, read_datasets
from fulmen.training.training import Training
from fulmen_cli.command import Output
from fulmen_cli.connection import Connection
from fulmen_cli.model.transfer import is_uploaded
from fulmen_cli.output import console, print_json
from fulmen_cli.train.preflight import Known, Preflight, preflights
from fulmen_cli.train.references import found_references

__all__ = ["check", "packed", "stage_problems_of"]

PROJECT: Final = "projects/default"
# What a training will have published, or names, when its stages begin.
ANY_VERSION: Final = "resources/any/versions/1"
ANY_RUN: Final = f"{PROJECT}/trainingRuns/any"
UNCHECKED: Final = "the settings of its stages, which were not checked: the algorithm service is not installed here."
ASK_LIMIT_S: Final = 60.0


async def check(
    path: Path, assignments: Sequence[str], seed: int | None, output: Output, connection: Connection
) -> None:
    """Checks a configuration without a stack, and shows what its bundle takes, and where its stages would run.

    Raises:
        ConfigError: with every problem of the file, of its stages and of its data.
    """
    plan, problems = read_train_config(path)
    plan = with_overrides(plan, assignments, seed=seed)
    found = stage_problems_of(plan)
    problems += found or ()
    datasets: dict[str, Dataset] = {}
    if all(file.is_file() for file in plan.data.files):
        try:
            datasets = read_datasets(plan.data)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(f"{path} is not valid.", problems)
    bundle = packed(plan)
    asked = await _asked(plan, connection, bundle, datasets)
    ahead: list[Preflight] = []
    if found is not None:
        known = Known(
            measured=asked.measured, unasked=asked.why_not, demonstrations=_lines(datasets.get("demonstrations"))
        )
        ahead = await asyncio.to_thread(preflights, plan, _stage_runs(plan, {}), known)
    problems = [
        stage_problem(plan, index, "settings.parallel", text)
        for index, each in enumerate(ahead)
        for text in each.problems
    ]
    if problems := [*problems, *asked.problems]:
        raise ConfigError(f"{path} is not valid.", problems)
    if output is Output.JSON:
        files = [{"name": name, "size_bytes": size_bytes} for name, size_bytes in bundle.sizes.items()]
        left_out = [{"name": each.name, "why": each.why} for each in bundle.left_out]
        stages = [each.document for each in ahead]
        told = {"gpus": asked.places, "gpus_not_planned": asked.why_not, "stages": stages}
        told["references_not_checked"] = asked.unchecked
        print_json({"files": files, "left_out": left_out, "settings_checked": found is not None, **told})
        return
    verdict = f"{path.name} is valid." if found is not None else f"{path.name} is valid, but for {UNCHECKED}"
    lines = bundle_lines(bundle) if plan.runs_code else []
    lines += [
        f"stage {number} ({stage.algorithm}): {text}"
        for number, stage, each in zip(count(1), plan.stages, ahead, strict=False)
        for text in each.lines
    ]
    lines += [
        f"stage {number} ({stage.algorithm}): {text}"
        for number, stage, text in zip(count(1), plan.stages, asked.places, strict=False)
    ]
    lines += [f"The placement of the stages was not planned: {asked.why_not}"] if asked.why_not else []
    lines += [f"References to existing resources were not checked: {asked.unchecked}"] if asked.unchecked else []
    console().print("\n".join([*lines, verdict, "Nothing was published."]), markup=False, soft_wrap=True)


def packed(plan: TrainConfig) -> Bundle:
    """Packs the folder, or nothing if it has no code to run."""
    return pack_bundle(plan.folder if plan.runs_code else None, data_files=plan.data.files, agent=plan.agent)


def stage_problems_of(config: TrainConfig) -> list[str] | None:
    """Returns the problems of all stages: unknown algorithms, settings that are not valid, inputs that are missing.

    Permissions of a deployment, such as addresses of engines, and its contents, such as versions, are checked by its
    services.

    Returns:
        The problems; None if the algorithm service is not installed.
    """
    try:
        from fulmen_algorithm.algorithms.registry import load_registry
        from fulmen_algorithm.runs.creation.rules import checked_draft
        from fulmen_algorithm.transport.encode import draft
    except ImportError:
        return None
    registry = load_registry()
    problems: list[str] = []
    for index, run in enumerate(_stage_runs(config, registry)):
        _, violations = checked_draft(draft(run, request_id=""), registry)
        problems += [stage_problem(config, index, each.field, each.description) for each in violations]
    return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The algorithm service's answers about the stages.

    Attributes:
        places: Where each would run.
        measured: What earlier runs like each measured.
        problems: Every reason why they cannot run there.
        why_not: Why it was not asked or does not answer.
        unchecked: Why it was not asked whether everything exists that the file and its stages name.
    """

    places: Sequence[str] = ()
    measured: Sequence[MeasuredSteps] = ()
    problems: Sequence[str] = ()
    why_not: str = ""
    unchecked: str = ""


async def _asked(config: TrainConfig, connection: Connection, bundle: Bundle, datasets: dict[str, Dataset]) -> _Asked:
    """Asks the algorithm service where the stages would run, what it knows of runs like them, and whether it would create them.

    Raises:
        CommandFailed: if a file for the connection cannot be read.
    """
    try:
        target = connection.deployment.targets().algorithm
    except LocalStackMissing:
        return _unasked("no stack is running, and no service is named.")
    first, *later = _stage_runs(config, {})
    request = PlanTrainingRunRequest(training_run=first, next_stages=later)
    try:
        async with connection.open() as client:
            answer = await client.training_runs.PlanTrainingRun(request, timeout=ASK_LIMIT_S)
            missing, unchecked = await _missing(config, connection, client, bundle, datasets)
    except (Unavailable, DeadlineExceeded):
        return _unasked(f"the algorithm service at {target} does not answer.")
    except FulmenError as error:
        return _unasked(error.message)
    problems = [
        f"stage {number} ({stage.algorithm}): {problem}"
        for number, stage, plan in zip(count(1), config.stages, answer.plans, strict=False)
        for problem in plan.problems
    ]
    # Problems of the service's machine are reported again at creation.
    problems += [each for each in missing if not any(each.endswith(text) for text in problems)]
    places = [plan.text for plan in answer.plans]
    return _Asked(places=places, measured=answer.measured, problems=problems, unchecked=unchecked)


def _unasked(why_not: str) -> _Asked:
    return _Asked(why_not=why_not, unchecked=why_not)


async def _missing(
    config: TrainConfig, connection: Connection, client: Services, bundle: Bundle, datasets: dict[str, Dataset]
) -> tuple[list[str], str]:
    """Has the service check the stages as their creation does, before anything is published.

    Returns:
        Every problem, and why it could not be asked, empty if it was.
    """
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            named = await found_references(config, connection, client)
            training = Training(
                services=client,
                config=named.config,
                bundle=bundle,
                datasets=datasets,
                names=RunNames.now(connection.project, config.name),
                inputs=dict(named.inputs),
            )
            await training.learn_algorithms()
            problems = [*named.problems, *await training.problems()]
    except (TimeoutError, Unavailable, DeadlineExceeded):
        return [], "the services do not answer."
    except FulmenError as error:
        return [], error.message
    # A folder of this machine is uploaded first.
    uploaded = is_uploaded(connection, config)
    return [each for each in problems if not (uploaded and ": policy.path: " in each)], ""


def _lines(dataset: Dataset | None) -> list[Any]:
    return [] if dataset is None else [json.loads(line) for line in dataset.content.splitlines()]


def _stage_runs(config: TrainConfig, registry: Mapping[str, Any]) -> list[training_run_pb2.TrainingRun]:
    """Returns the runs of all stages, as if everything that they name were published; `registry` has the known algorithms."""
    own = ("agent",) if config.agent is not None else ()
    inputs = dict.fromkeys((*own, "bundle", *config.data.uses), ANY_VERSION)
    if config.data.rollouts:
        inputs["rollouts"] = ANY_RUN
    runs: list[training_run_pb2.TrainingRun] = []
    continues = False
    for stage in config.stages:
        entry = registry.get(stage.algorithm)
        trains = entry is None or entry.trains
        runs.append(
            training_run(
                config,
                stage,
                name="",
                inputs=inputs,
                read={stage.algorithm: entry.inputs if entry else ()},
                continues=continues,
                trains=trains,
            )
        )
        continues = continues or trains
    return runs
