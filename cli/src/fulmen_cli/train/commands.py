"""`fulmen train` validates a configuration, publishes its inputs, creates its stages and follows them; `fulmen algorithms` lists algorithms."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import algorithm_pb2, training_run_pb2, training_run_service_pb2
from fulmen.rpc.services import Services
from fulmen.train_toml.reader import hint
from fulmen.train_toml.train import TrainConfig, load_train_config, with_overrides
from fulmen.training.bundle import Bundle, bundle_lines
from fulmen.training.following import follow_run
from fulmen.training.plan import RunNames
from fulmen.training.task_files import read_datasets
from fulmen.training.training import Training
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.record import make_private
from fulmen_cli.model.transfer import with_uploaded_base
from fulmen_cli.names import short_name
from fulmen_cli.output import as_dict, console, print_json, print_json_line, print_rows
from fulmen_cli.rollout.figures import failure_of_run
from fulmen_cli.run.progress import RunProgress
from fulmen_cli.train.check import check, packed
from fulmen_cli.train.in_process import run_training, unhurried
from fulmen_cli.train.references import found_references
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

__all__ = ["register"]

REPORTS_FOLDER: Final = "reports"
SUMMARY_FILE: Final = "summary.json"


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
        bool,
        typer.Option(
            "--dry-run", "--check", help="Check files and settings and list the contents of the bundle; run nothing."
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Trains an agent as configured in a train.toml.

    Checks every file first: if there are problems, all of them are reported and nothing is created. The stages follow each
    other in the algorithm service. Ctrl-C only detaches: they continue, and the command prints how to watch or stop them.

    With --in-process, a `breakpoint()` in the agent, its grader or an algorithm opens the debugger there: store, proxy,
    runner, algorithm and engine are in this process, Python agents run in its main thread one at a time, and no attempt is
    ended for taking long. The database is a child process, as are the script that builds the first weights and agents that
    are commands. State starts empty and ends with the command; run few steps.

    A folder in [policy] path is uploaded first if the algorithm service is on another machine.

    The folder of the train.toml becomes the agent's bundle, without what may hold secrets and what .gitignore and
    .fulmenignore name. --dry-run shows the list, as does the first publication.

    --check, which is the same as --dry-run, needs no stack: it checks the files, every line of the data, and the settings of
    every stage by the rules of the algorithm service that is installed here (`fulmen[local]`). If a stack runs, or a service
    is named, the service also plans which GPUs of its machine the stages would get, reports how long they took before, and
    checks whether it would create them: reward models, versions, runs, scores and secrets that are named must exist.

    With --output json, prints one event per line, as `fulmen run watch` does; the last line is the summary.

    Examples:

        fulmen train examples/arithmetic/train.toml

        fulmen train train.toml --check

        fulmen train examples/arithmetic/train.toml --seed 7 --set grpo.steps=20 --set grpo.loss.kind=gspo

        fulmen train train.toml --output json

        fulmen train train.toml --in-process --set sft.steps=20 --set sft.warmup_steps=2
    """
    if dry_run:
        await check(config, assignments or [], seed, output, connection)
        return
    plan = with_overrides(load_train_config(config), assignments or [], seed=seed)
    await _run(connection, plan, report_dir, in_process=in_process, is_quiet=output is Output.JSON)


async def _run(
    connection: Connection, plan: TrainConfig, report_dir: Path | None, *, in_process: bool, is_quiet: bool
) -> None:
    """Publishes what a training needs, follows its stages, and writes and shows the report."""
    plan = unhurried(plan) if in_process else plan
    datasets = read_datasets(plan.data)
    bundle = packed(plan)
    screen = console()
    screen.quiet = is_quiet
    names = RunNames.now(connection.project, plan.name)
    folder = report_dir or connection.state_dir / REPORTS_FOLDER / names.prefix
    async with connection.open() as client:
        named = (await found_references(plan, connection, client, in_process=in_process)).checked()
        plan = await with_uploaded_base(connection, client, named.config, screen)
        training = Training(
            services=client, config=plan, bundle=bundle, datasets=datasets, names=names, inputs=dict(named.inputs)
        )
        stages = await _begun(client, training, screen=screen, in_process=in_process)
        outcomes = await stages.run()
        compared = compared_stage(outcomes)
        sample = await sample_before_and_after(client, compared.run.name) if compared is not None else None
    if report_dir is None:
        make_private(connection.state_dir)
    save_report(folder, f"Training of {plan.name}", outcomes, sample)
    _show_end(screen, outcomes, sample, folder, has_store=not in_process)


def _show_end(
    screen: Console, outcomes: list[StageOutcome], sample: SamplePair | None, folder: Path, *, has_store: bool
) -> None:
    """Writes the summary and shows it, as one line of JSON where the screen is quiet."""
    summary = _as_json(outcomes, sample, folder)
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if screen.quiet:
        print_json_line(summary)
        return
    print_summary(screen, outcomes, sample, folder, has_store=has_store)
    screen.print(accuracy_line(outcomes) or "validation accuracy was not measured")


async def _begun(client: Services, plan: Training, *, screen: Console, in_process: bool) -> _Stages:
    """Validates a training, publishes its inputs, and validates it with them."""
    counts = [f"{len(plan.bundle.files)} files"] if plan.config.runs_code else []
    counts += [f"{each.count} {use.replace('_', ' ')}" for use, each in plan.datasets.items()]
    screen.print(f"{plan.config.name}: {', '.join(counts)}")

    def show(first: Bundle) -> None:
        screen.print("\n".join(bundle_lines(first)), markup=False, soft_wrap=True)

    await plan.begin(show_first=show)
    return _Stages(client=client, plan=plan, screen=screen, in_process=in_process)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """The stages of one `fulmen train`."""

    client: Services
    plan: Training
    screen: Console
    in_process: bool

    async def run(self) -> list[StageOutcome]:
        """Creates the stages and follows them to their end.

        Raises:
            CommandFailed: if a stage ends otherwise than well.
        """
        created = await self.plan.create()
        names = created.stages or [created.name]
        algorithms = [stage.algorithm for stage in self.plan.config.stages]
        return [
            await self._stage(name, algorithm, is_last=name == names[-1])
            for name, algorithm in zip(names, algorithms, strict=True)
        ]

    async def _stage(self, name: str, algorithm: str, *, is_last: bool) -> StageOutcome:
        short = short_name(name)
        self.screen.print(f"{algorithm}: run {short}")
        try:
            ended = await self._follow(name, algorithm)
        except asyncio.CancelledError:
            self.screen.print(
                "Stopped: the run ended with this process."
                if self.in_process
                else f"Detached; the run continues. Watch it: fulmen run watch {short}   Stop it: fulmen run stop {short}"
            )
            if not (self.in_process or is_last):
                self.screen.print("The following stages start without this command.")
            raise
        if ended.state != training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED:
            failure = await failure_of_run(self.client, ended.name)
            raise CommandFailed("\n".join(filter(None, (_why(ended), failure))), exit_code=Exit.FAILED)
        report = await self.client.training_runs.GetTrainingRunReport(
            training_run_service_pb2.GetTrainingRunReportRequest(name=ended.name)
        )
        return StageOutcome(
            run=ended,
            seconds=(ended.end_time.ToDatetime() - ended.start_time.ToDatetime()).total_seconds(),
            markdown=report.markdown,
            curve_png=report.curve_png,
            failure=await failure_of_run(self.client, ended.name),
        )

    async def _follow(self, name: str, algorithm: str) -> training_run_pb2.TrainingRun:
        ended = training_run_pb2.TrainingRun(name=name)
        as_json = self.screen.quiet
        with RunProgress(self.screen, algorithm, step_count=0, as_json=as_json, lines_only=self.in_process) as shown:
            async for event in follow_run(self.client, name, on_interruption=shown.interrupted):
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
        print_rows(output, ("algorithm", "trains", "description"), rows, messages=list(found.values()), empty="None.")
        return
    if name not in found:
        raise CommandFailed(f"The algorithm {name!r} does not exist{hint(name, list(found))}")
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
