"""`fulmen train` validates a configuration, publishes its inputs and runs its stages; `fulmen algorithms` lists algorithms."""

from __future__ import annotations

import asyncio
import datetime
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import algorithm_pb2, training_run_pb2, training_run_service_pb2
from fulmen.client import Client
from fulmen.errors import ArgumentInvalid, SettingsInvalid
from fulmen.train_toml.reader import hint
from fulmen.train_toml.train import ConfigError, TrainConfig, load_train_config, with_overrides
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.record import make_private
from fulmen_cli.output import as_dict, console, print_json, print_rows
from fulmen_cli.rollout.rescore.scores import found_scores
from fulmen_cli.run.progress import RunProgress
from fulmen_cli.run.states import run_name, short_name
from fulmen_cli.run.watch import follow_run
from fulmen_cli.train.bundle import Bundle, bundle_lines, pack_bundle
from fulmen_cli.train.in_process import run_training, unhurried
from fulmen_cli.train.plan import RunNames, training_run
from fulmen_cli.train.publish import best_prompt, publish, published_prompt, require_secrets
from fulmen_cli.train.report import (
    SamplePair,
    StageOutcome,
    accuracy_line,
    compared_stage,
    print_summary,
    sample_before_and_after,
    save_report,
    trained_model,
)
from fulmen_cli.train.task_files import Dataset, read_datasets

__all__ = ["register"]

REPORTS_FOLDER: Final = "reports"
SUMMARY_FILE: Final = "summary.json"
RANDOM_BYTES: Final = 2
INPUTS_PREFIX: Final = "inputs."
SEARCHES_PROMPTS: Final = "apo"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    remote_command(app, "train", run_by=run_training)(train)
    remote_command(app, "algorithms")(algorithms)


async def train(
    connection: Connection,
    config: Annotated[Path, typer.Argument(help="The train.toml; its folder is the agent's.")],
    seed: Annotated[int | None, typer.Option(help="Random seed of every stage.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="ALGORITHM.SETTING=VALUE", help="Override a setting, STAGE.NAME=VALUE. May be repeated."
        ),
    ] = None,
    report_dir: Annotated[
        Path | None, typer.Option(help="Directory of the report; by default in the state directory.")
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="Run all services in this process, for debugging; no stack is needed."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the files and list what the bundle takes; publish and run nothing.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Trains an agent as configured in a train.toml.

    Checks every file first: if there are problems, all of them are reported and nothing is created. Ctrl-C only detaches:
    the run continues, and the command prints how to watch or stop it.

    With --in-process, a `breakpoint()` in the agent, its grader or an algorithm stops where it stands: store, proxy, runner,
    algorithm and engine are in this process, Python agents run in its main thread one at a time, and no attempt is
    ended for taking long. The database is a child process, as are the script that builds the first weights and agents
    that are commands. State starts empty and ends with the command; run few steps.

    The folder of the train.toml becomes the agent's bundle, without what may hold secrets and what .gitignore and
    .fulmenignore name. --dry-run shows the list, as does the first publication.

    Examples:

        fulmen train examples/arithmetic/train.toml

        fulmen train train.toml --dry-run

        fulmen train examples/arithmetic/train.toml --seed 7 --set grpo.steps=20 --set grpo.loss.kind=gspo

        fulmen train train.toml --output json

        fulmen train train.toml --in-process --set sft.steps=20 --set sft.warmup_steps=2
    """
    plan = with_overrides(load_train_config(config), assignments or [], seed=seed)
    plan = unhurried(plan) if in_process else plan
    plan = replace(plan, data=replace(plan.data, rollouts=run_name(plan.data.rollouts, connection)))
    datasets = read_datasets(plan.data)
    bundle = pack_bundle(plan.folder, data_files=plan.data.files, agent=plan.agent)
    if dry_run:
        _show_files(bundle, output)
        return
    screen = console()
    screen.quiet = output is Output.JSON
    stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(RANDOM_BYTES)}"
    folder = report_dir or connection.state_dir / REPORTS_FOLDER / f"{plan.name}-{stamp}"
    async with connection.open() as client:
        names = RunNames(project=connection.project, prefix=f"{plan.name}-{stamp}")
        training = await _begun(client, plan, bundle, datasets, names=names, screen=screen, in_process=in_process)
        outcomes = await training.run()
        compared = compared_stage(outcomes)
        sample = await sample_before_and_after(client, compared.run.name) if compared is not None else None
    if report_dir is None:
        make_private(connection.state_dir)
    save_report(folder, f"Training of {plan.name}", outcomes, sample)
    _show_end(screen, outcomes, sample, folder, has_store=not in_process)


def _show_end(
    screen: Console, outcomes: list[StageOutcome], sample: SamplePair | None, folder: Path, *, has_store: bool
) -> None:
    """Writes the summary and shows it, as JSON where the screen is quiet."""
    summary = _as_json(outcomes, sample, folder)
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if screen.quiet:
        print_json(summary)
        return
    print_summary(screen, outcomes, sample, folder, has_store=has_store)
    screen.print(accuracy_line(outcomes) or "validation accuracy was not measured")


def _show_files(bundle: Bundle, output: Output) -> None:
    if output is Output.TABLE:
        console().print("\n".join([*bundle_lines(bundle), "Nothing was published."]), markup=False, soft_wrap=True)
        return
    files = [{"name": name, "size_bytes": size_bytes} for name, size_bytes in bundle.sizes.items()]
    print_json({"files": files, "left_out": [{"name": each.name, "why": each.why} for each in bundle.left_out]})


async def _begun(
    client: Client,
    plan: TrainConfig,
    bundle: Bundle,
    datasets: dict[str, Dataset],
    *,
    names: RunNames,
    screen: Console,
    in_process: bool,
) -> _Training:
    """Validates a training, publishes its inputs, and validates it with them."""
    counts = [f"{each.count} {use.replace('_', ' ')}" for use, each in datasets.items()]
    screen.print(f"{plan.name}: {', '.join([f'{len(bundle.files)} files', *counts])}")
    await require_secrets(client, plan.agent.secrets, in_process=in_process)
    known = await _algorithms(client)
    training = _Training(
        client=client, plan=plan, inputs={}, algorithms=known, names=names, screen=screen, in_process=in_process
    )
    await training.validate()
    training.inputs = await _published(client, plan, bundle, datasets, screen)
    await training.validate()
    return training


async def _published(
    client: Client, plan: TrainConfig, bundle: Bundle, datasets: dict[str, Dataset], screen: Console
) -> dict[str, str]:
    """Publishes the inputs of the runs; returns the versions by use."""

    def show(first: Bundle) -> None:
        screen.print("\n".join(bundle_lines(first)), markup=False, soft_wrap=True)

    more = {"scores": str((await found_scores(client, plan.data.scores)).name)} if plan.data.scores else {}
    if plan.data.rollouts:
        more["rollouts"] = plan.data.rollouts
    published = await publish(
        client, name=plan.name, agent=plan.agent, bundle=bundle, datasets=datasets, show_first=show
    )
    if plan.data.prompt is not None:
        more["prompt"] = await published_prompt(client, plan.name, plan.data.prompt)
    return {**published.inputs, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """An algorithm of the service: the inputs that it reads, and whether it trains weights."""

    inputs: tuple[str, ...]
    trains: bool


async def _algorithms(client: Client) -> dict[str, _Known]:
    """Lists the algorithms of the service."""
    answer = await client.training_runs.ListAlgorithms(training_run_service_pb2.ListAlgorithmsRequest())
    return {
        each.name: _Known(
            inputs=(*each.required_inputs, *each.optional_inputs, *each.any_of_inputs), trains=each.trains
        )
        for each in answer.algorithms
    }


@dataclass(slots=True, kw_only=True)
class _Training:
    """The stages of one `fulmen train`."""

    client: Client
    plan: TrainConfig
    inputs: dict[str, str]
    algorithms: dict[str, _Known]
    names: RunNames
    screen: Console
    in_process: bool

    async def validate(self) -> None:
        """Validates every stage at the service; the start version of later ones is not known yet.

        Before anything is published, all but the inputs is checked.

        Raises:
            ConfigError: with every problem of every stage.
        """
        problems: list[str] = []
        for number in range(1, len(self.plan.stages) + 1):
            problems += await self._problems(number, self._training_run(number, start_version=""))
        if problems:
            raise ConfigError(f"{self.plan.file} is not valid; no run was created.", problems)

    async def run(self) -> list[StageOutcome]:
        """Runs the stages; each starts from the policy version of the previous one.

        Raises:
            CommandFailed: if a stage ends otherwise than well.
        """
        outcomes: list[StageOutcome] = []
        start_version = ""
        for number in range(1, len(self.plan.stages) + 1):
            left = [stage.algorithm for stage in self.plan.stages[number:]]
            outcome = await self._stage(self._training_run(number, start_version=start_version), left)
            outcomes.append(outcome)
            start_version = outcome.run.policy_version or start_version
            await self._take_prompt(outcome.run)
        return outcomes

    async def _take_prompt(self, run: training_run_pb2.TrainingRun) -> None:
        """Passes the best prompt of a search on to the following stages."""
        if run.algorithm == SEARCHES_PROMPTS:
            self.inputs["prompt"] = await best_prompt(self.client, run.inputs["prompt"])

    def _training_run(self, number: int, *, start_version: str) -> training_run_pb2.TrainingRun:
        stage = self.plan.stages[number - 1]
        return training_run(
            self.plan,
            stage,
            name=self.names.of(number, stage),
            inputs=self.inputs,
            read={name: each.inputs for name, each in self.algorithms.items()},
            start_version=start_version,
            trains=stage.algorithm not in self.algorithms or self.algorithms[stage.algorithm].trains,
        )

    async def _problems(self, number: int, run: training_run_pb2.TrainingRun) -> list[str]:
        try:
            await self.client.training_runs.CreateTrainingRun(
                training_run_service_pb2.CreateTrainingRunRequest(training_run=run, validate_only=True)
            )
        except (ArgumentInvalid, SettingsInvalid) as error:
            where = f"stage {number} ({run.algorithm})"
            if not error.violations:
                return [f"{where}: {error.message}"]
            return [
                f"{where}: {each.field}: {each.description}"
                for each in error.violations
                if self.inputs or not each.field.startswith(INPUTS_PREFIX)
            ]
        return []

    async def _stage(self, run: training_run_pb2.TrainingRun, left: Sequence[str]) -> StageOutcome:
        started = time.monotonic()
        request = training_run_service_pb2.CreateTrainingRunRequest(training_run=run, request_id=run.name)
        created = (await self.client.training_runs.CreateTrainingRun(request)).training_run
        short = short_name(created.name)
        self.screen.print(f"{run.algorithm}: run {short}")
        try:
            ended = await self._follow(created)
        except asyncio.CancelledError:
            self.screen.print(
                "Stopped: the run ended with this process."
                if self.in_process
                else f"Detached; the run continues. Watch it: fulmen run watch {short}   Stop it: fulmen run stop {short}"
            )
            if left and not self.in_process:
                self.screen.print(f"Stages that this command does not begin any more: {', '.join(left)}.")
            raise
        if ended.state != training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED:
            raise CommandFailed(_why(ended), exit_code=Exit.FAILED)
        report = await self.client.training_runs.GetTrainingRunReport(
            training_run_service_pb2.GetTrainingRunReportRequest(name=ended.name)
        )
        seconds = time.monotonic() - started
        return StageOutcome(run=ended, seconds=seconds, markdown=report.markdown, curve_png=report.curve_png)

    async def _follow(self, run: training_run_pb2.TrainingRun) -> training_run_pb2.TrainingRun:
        ended = run
        quiet = self.screen.quiet
        with RunProgress(
            self.screen, run.algorithm, step_count=run.step_count, quiet=quiet, lines_only=self.in_process
        ) as shown:
            async for event in follow_run(self.client, run.name, on_interruption=shown.interrupted):
                shown.show(event)
                if event.HasField("run"):
                    ended = event.run
        return ended


def _why(run: training_run_pb2.TrainingRun) -> str:
    state = training_run_pb2.TrainingRunState.Name(run.state).removeprefix("TRAINING_RUN_STATE_").lower()
    reason = f": {run.failure_message}" if run.failure_message else "."
    return f"The run {run.name} ended as {state}{reason}"


def _as_json(outcomes: list[StageOutcome], sample: SamplePair | None, folder: Path) -> dict[str, Any]:
    pair = None if sample is None else {"before": sample.before.rollout, "after": sample.after.rollout}
    return {
        "training_runs": [{**as_dict(each.run), "seconds": round(each.seconds, 3)} for each in outcomes],
        "model_path": trained_model(outcomes),
        "report": str(folder / "report.md"),
        "sample": pair,
        "summary": accuracy_line(outcomes),
    }


async def algorithms(
    connection: Connection,
    name: Annotated[str | None, typer.Argument(help="Show the inputs and settings of this algorithm.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists the algorithms; with a name, the inputs and settings of that one.

    Examples:

        fulmen algorithms

        fulmen algorithms grpo
    """
    async with connection.open() as client:
        request = training_run_service_pb2.ListAlgorithmsRequest()
        found = {each.name: each for each in (await client.training_runs.ListAlgorithms(request)).algorithms}
    if name is None:
        rows = [(each.name, "weights" if each.trains else "", each.summary) for each in found.values()]
        print_rows(output, ("algorithm", "trains", "what it does"), rows, messages=list(found.values()), empty="None.")
        return
    if name not in found:
        raise CommandFailed(f"There is no algorithm {name!r}{hint(name, list(found))}")
    if output is Output.JSON:
        print_json(as_dict(found[name]))
        return
    _print_algorithm(found[name])


def _print_algorithm(algorithm: algorithm_pb2.Algorithm) -> None:
    screen = console()
    screen.print(Text(f"{algorithm.name}: {algorithm.summary}"))
    for label, inputs in (
        ("needs", algorithm.required_inputs),
        ("one of", algorithm.any_of_inputs),
        ("may have", algorithm.optional_inputs),
    ):
        if inputs:
            screen.print(Text(f"{label:<10}{', '.join(inputs)}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("setting", "default", "what it is"):
        table.add_column(column, overflow="fold")
    for setting in algorithm.settings:
        table.add_row(Text(setting.name), Text(setting.default_json or "–"), Text(setting.summary))
    screen.print(table)
