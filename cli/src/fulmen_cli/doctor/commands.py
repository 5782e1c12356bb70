"""`fulmen doctor`: checks this machine or a deployment."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.doctor import deployment
from fulmen_cli.doctor import machine as checks
from fulmen_cli.doctor.finding import Finding
from fulmen_cli.exits import Exit
from fulmen_cli.local.record import StackFolder
from fulmen_cli.output import console, print_json, working
from fulmen_cli.stack.status import status_of

__all__ = ["findings_of", "register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "doctor")(doctor)


async def doctor(
    connection: Connection,
    call: Annotated[
        str,
        typer.Option(
            "--call",
            metavar="MODEL",
            help="Check that this model returns token ids and log-probabilities, by one call.",
        ),
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Checks this machine and its stack, or a deployment, and shows how to fix problems.

    On this machine: packages, database, disk, memory, clock, ports, tools that agents may need. In a deployment: the token, each
    service and its latency, the store's database, the queue and its runners, versions, clocks, backends.

    Notes are informational; failures come with a remedy.

    Exit status 1 if a check fails.

    Examples:

        fulmen doctor

        fulmen doctor --store-target store:7101 --llm-proxy-target proxy-1:7201,proxy-2:7201 --call arithmetic

        fulmen doctor --output json
    """
    with working("Looking…"):
        findings = await findings_of(connection, model=call)
    if output is Output.JSON:
        print_json([dataclasses.asdict(each) for each in findings])
    else:
        _print(findings)
    if any(each.ok is False for each in findings):
        raise typer.Exit(Exit.FAILED)


async def findings_of(connection: Connection, *, model: str = "") -> list[Finding]:
    """Runs all checks: of this machine unless a remote deployment is named, and of the deployment."""
    folder = StackFolder(connection.state_dir.resolve())
    if connection.names_services:
        return [checks.python(), *await deployment.deployment(connection, model=model)]
    findings = await asyncio.to_thread(_machine, folder)
    record = folder.read() if folder.is_running() else None
    if record is not None and record.targets:
        findings += await deployment.deployment(connection, model=model)
    return findings


def _machine(folder: StackFolder) -> list[Finding]:
    record = folder.read() if folder.is_running() else None
    status = status_of(record) if record is not None and record.targets else None
    return [
        checks.python(),
        checks.packages(),
        checks.versions(),
        checks.postgres(),
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


def _print(findings: Sequence[Finding]) -> None:
    for each in findings:
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("note", "yellow")}[each.ok]
        console().print(Text.assemble((mark, style), f"  {each.what:<10} {each.text}"), soft_wrap=True)
        if each.advice:
            console().print(Text.assemble(" " * 17, (each.advice, "dim")), soft_wrap=True)
