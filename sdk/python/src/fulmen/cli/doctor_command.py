"""`fulmen doctor`: says what on this machine would keep a stack or its agents from running, and what to do."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import typer
from rich.text import Text

from fulmen.cli import doctor_checks as checks
from fulmen.cli.command import Output, OutputOption, StateDirOption, local_command
from fulmen.cli.doctor_checks import Finding
from fulmen.cli.exits import Exit
from fulmen.cli.output import console, print_json, working
from fulmen.cli.stack_status import status_of
from fulmen.local.record import DEFAULT_STATE_DIR, StackFolder

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    local_command(app, "doctor")(doctor)


def doctor(state_dir: StateDirOption = Path(DEFAULT_STATE_DIR), output: OutputOption = Output.TABLE) -> None:
    """Checks this machine: packages, database, disk, memory, clock, ports, the running stack, and what agents may need.

    What is only worth knowing is a note; what keeps a stack from running is a failure, with what to do.

    Exits with 1 if something fails.

    Examples:

        fulmen doctor

        fulmen doctor --output json
    """
    folder = StackFolder(state_dir.resolve())
    with working("Looking…"):
        findings = _findings(folder)
    if output is Output.JSON:
        print_json([dataclasses.asdict(each) for each in findings])
    else:
        _print(findings)
    if any(each.ok is False for each in findings):
        raise typer.Exit(Exit.FAILED)


def _findings(folder: StackFolder) -> list[Finding]:
    record = folder.read() if folder.is_running() else None
    status = status_of(record) if record is not None and record.targets else None
    return [
        checks.python(),
        checks.packages(),
        checks.versions(),
        checks.database(),
        checks.disk(folder.path),
        checks.memory(),
        checks.clock(record, datetime.datetime.now(datetime.UTC)),
        checks.ports(folder),
        checks.stack(folder, status),
        *([checks.stack_version(record)] if record is not None else []),
        checks.instrumentors(),
        checks.docker(),
        checks.kubernetes(),
        checks.node(),
        checks.gpu(),
    ]


def _print(findings: list[Finding]) -> None:
    for each in findings:
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("note", "yellow")}[each.ok]
        console().print(Text.assemble((mark, style), f"  {each.what:<10} {each.text}"), soft_wrap=True)
        if each.advice:
            console().print(Text.assemble(" " * 17, (each.advice, "dim")), soft_wrap=True)
