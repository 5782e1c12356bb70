"""`fulmen sweep` validates all trials of a sweep.toml, creates their runs rung by rung, and prints the table of trials."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fulmen.sweeps.file import Sweep, load_sweep
from fulmen.sweeps.halving import TrialResult, halve
from fulmen.sweeps.trials import Trials, trial_configs
from fulmen.train_toml.reader import ConfigError
from fulmen.train_toml.train import TrainConfig, load_train_config
from fulmen.training.task_files import read_datasets
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.model.transfer import with_uploaded_base
from fulmen_cli.names import short_name
from fulmen_cli.output import console, print_json
from fulmen_cli.train.check import packed, stage_problems_of
from fulmen_cli.train.references import found_references

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "sweep")(sweep)


async def sweep(
    connection: Connection,
    config: Annotated[Path, typer.Argument(help="The sweep.toml; it names the train.toml.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--check", help="Check and list all trials; run nothing.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Tries settings of a train.toml for a few steps each, and the best of them for longer (successive halving).

    Checks every trial first: if there are problems, all of them are reported and nothing is created.

    The state of a sweep is in its runs. If the command is killed, the machine restarts or Ctrl-C detaches it, existing
    runs continue, and the same command finds them by their names and creates the missing ones. It refuses to continue
    with other settings, data or another agent; give the sweep another name then.

    Examples:

        fulmen sweep sweep.toml --check

        fulmen sweep sweep.toml

        fulmen sweep sweep.toml --output json
    """
    given = load_sweep(config)
    plan = load_train_config(given.train)
    configs, datasets, bundle = trial_configs(plan, given), read_datasets(plan.data), packed(plan)
    if dry_run:
        _check(given, configs, output)
        return
    screen = console()
    screen.quiet = output is Output.JSON
    async with connection.open() as client:
        named = (await found_references(plan, connection, client)).checked()
        plan = await with_uploaded_base(connection, client, named.config, screen)
        trials = Trials(
            services=client,
            project=connection.project,
            sweep=given,
            plan=plan,
            bundle=bundle,
            datasets=datasets,
            inputs=dict(named.inputs),
            tell=lambda line: screen.print(line, markup=False, soft_wrap=True),
        )
        await trials.begin()
        screen.print(_plan_text(given))
        try:
            results = await halve(given, trials)
        except asyncio.CancelledError:
            screen.print(f"Detached; the runs continue. To continue the sweep: fulmen sweep {config}")
            raise
    _show(given, results, output)
    if results[0].value is None:
        raise CommandFailed(f"No trial has a value: {results[0].why}", exit_code=Exit.FAILED)


def _check(sweep: Sweep, configs: Sequence[TrainConfig], output: Output) -> None:
    """Checks all trials by the rules of the algorithm service that is installed here, and lists them.

    Raises:
        ConfigError: with every problem of every trial, each once.
    """
    problems: dict[str, None] = {}
    for config in configs:
        problems |= dict.fromkeys(stage_problems_of(config) or ())
    if problems:
        raise ConfigError(f"{sweep.file} is not valid.", problems)
    settings = sweep.settings()
    if output is Output.JSON:
        rungs = [{"trials": count, "steps": steps} for count, steps in sweep.rungs]
        print_json({"rungs": rungs, "trials": settings})
        return
    screen = console()
    for number, each in enumerate(settings):
        screen.print(Text(f"trial {number}: {_told(each)}"))
    screen.print(f"{sweep.file.name} is valid. {_plan_text(sweep)} Nothing was published.")


def _plan_text(sweep: Sweep) -> str:
    rungs = ", then ".join(f"{count} with {steps} steps" for count, steps in sweep.rungs)
    return f"{sweep.name}: {rungs}."


def _show(sweep: Sweep, results: Sequence[TrialResult], output: Output) -> None:
    settings = sweep.settings()
    if output is Output.JSON:
        print_json([{**asdict(each), "settings": settings[each.trial]} for each in results])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trial", justify="right")
    for column in sweep.search:
        table.add_column(column, overflow="fold", justify="right")
    table.add_column("steps", justify="right")
    table.add_column(sweep.metric, justify="right")
    table.add_column("run", overflow="fold")
    for each in results:
        value = each.why if each.value is None else f"{each.value:.4g}"
        cells = [_cell(settings[each.trial][key]) for key in sweep.search]
        table.add_row(str(each.trial), *cells, str(each.steps), value, short_name(each.run))
    screen = console()
    screen.print(table)
    best = results[0]
    if best.value is not None:
        screen.print(Text(f"The best: {_told(settings[best.trial])}"))


def _told(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {_cell(value)}" for key, value in settings.items())


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
