"""`fulmen up`, `down`, `status` and `logs`: the local stack as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from fulmen.connection import Deployment
from fulmen_cli.command import Output, OutputOption, StateDirOption, local_command
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.background import (
    POLL_INTERVAL_S,
    STOP_LIMIT_S,
    start_supervisor,
    wait_for_end,
    wait_until_ready,
)
from fulmen_cli.local.fleet import FleetRange, fleet_range
from fulmen_cli.local.ports import DEFAULT_PORTS
from fulmen_cli.local.postgres import EmbeddedPostgres
from fulmen_cli.local.record import DEFAULT_STATE_DIR, StackFolder, StackRecord
from fulmen_cli.local.services import DEFAULTS, port_names, require_installed
from fulmen_cli.output import console, print_json
from fulmen_cli.stack.opening import open_in_browser
from fulmen_cli.stack.status import stack_table, status_of

__all__ = ["register"]

FOLLOW_INTERVAL_S: Final = 0.2
DEFAULT_TAIL_LINES: Final = 50


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    local_command(app, "up")(up)
    local_command(app, "down")(down)
    local_command(app, "status")(status)
    local_command(app, "logs")(logs)


def up(
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIR),
    detach: Annotated[
        bool, typer.Option("--detach/--foreground", help="Return when all services are ready, or run until Ctrl-C.")
    ] = True,
    runners: Annotated[
        str,
        typer.Option(
            metavar="N|auto[:MIN-MAX]",
            help="Number of runner processes. `auto` scales them with the queue, by default up to one per processor and 512 MiB of memory; 0 if runners start elsewhere.",
        ),
    ] = "1",
    slots: Annotated[int | None, typer.Option(min=1, max=10_000, help="Concurrent attempts of each runner.")] = None,
    port: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="Port of a service, NAME=NUMBER. May be repeated. By default the port of the last start, the usual one, or a free one.",
        ),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Open the console in a browser, signed in.")] = False,
) -> None:
    """Starts the four services and their database on this machine.

    Data is kept in the state directory: trained weights are still there after `fulmen down` and `fulmen up`.

    Examples:

        fulmen up

        fulmen up --open

        fulmen up --runners 2 --slots 32

        fulmen up --runners auto:1-4

        fulmen up --runners 0

        fulmen up --port store=7101 --port llm_proxy_http=7200

        fulmen up --foreground
    """
    wanted = _runners(runners)
    folder = StackFolder(state_dir.resolve())
    if folder.is_up(folder.read()):
        _say_running(folder)
        if opened:
            _open(folder)
        return
    require_installed()
    settings = {
        "state_dir": str(folder.path),
        "runners": wanted.minimum,
        "max_runners": wanted.maximum if runners.startswith("auto") else None,
        "slots": slots,
        "ports": _ports(port or [], port_names(wanted.maximum)),
    }
    folder.create()
    supervisor = start_supervisor(folder, settings, tied=not detach)
    with _stopped_by_ctrl_c(supervisor):
        _follow_start(folder, supervisor)
        if opened:
            _open(folder)
        if not detach:
            _stay(supervisor)


def down(state_dir: StateDirOption = Path(DEFAULT_STATE_DIR)) -> None:
    """Stops the local stack; its data is kept.

    Example:

        fulmen down
    """
    folder = StackFolder(state_dir.resolve())
    record = folder.read()
    if record is None or not folder.is_up(record):
        if folder.database.exists():
            EmbeddedPostgres(folder.database).stop()
        console().print(f"No stack is running on {folder.path}.")
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.keeper_pid if folder.is_kept(record) else record.supervisor_pid, signal.SIGTERM)
    with console().status("Stopping…"):
        deadline = time.monotonic() + STOP_LIMIT_S
        while folder.is_up(record):
            if time.monotonic() > deadline:
                raise CommandFailed(
                    f"The stack has not stopped after {STOP_LIMIT_S:.0f} s (supervisor {record.supervisor_pid}): see "
                    f"{folder.log_file('supervisor')}."
                )
            time.sleep(POLL_INTERVAL_S)
        # The server outlives a supervisor that was killed meanwhile.
        EmbeddedPostgres(folder.database).stop()
    console().print(f"Stopped. Its data is in {folder.path}.")


def status(state_dir: StateDirOption = Path(DEFAULT_STATE_DIR), output: OutputOption = Output.TABLE) -> None:
    """Shows the state, health and ports of the local stack, and the queue.

    Exit status 1 if the stack is not running or a service is not ready.

    Examples:

        fulmen status

        fulmen status --output json
    """
    record = StackFolder(state_dir.resolve()).read_running()
    found = status_of(record)
    if output is Output.JSON:
        print_json(found.as_dict())
    else:
        found.print(console())
    if not found.healthy:
        raise typer.Exit(Exit.FAILED)


def logs(
    service: Annotated[str, typer.Argument(help="store, llm_proxy, algorithm, runner-1, database or supervisor.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines from the end.")
    ] = DEFAULT_TAIL_LINES,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIR),
) -> None:
    """Shows the log of one process of the local stack.

    Examples:

        fulmen logs store

        fulmen logs runner-1 -f
    """
    folder = StackFolder(state_dir.resolve())
    path = folder.database / "server.log" if service == "database" else folder.log_file(service)
    if not path.is_file():
        known = sorted(each.stem for each in folder.logs.glob("*.log")) if folder.logs.exists() else []
        raise CommandFailed(
            f"No log of {service!r} in {folder.logs}; available: {', '.join(known) or 'none'}.",
            exit_code=Exit.NOT_FOUND,
        )
    for line in _tail(path, lines):
        sys.stdout.write(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(path)


@contextlib.contextmanager
def _stopped_by_ctrl_c(supervisor: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stops the stack, and ends the command, on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        console().print("Stopping…")
        supervisor.terminate()
        wait_for_end(supervisor)
        raise typer.Exit(0) from None


def _say_running(folder: StackFolder) -> None:
    record = folder.read()
    console().print(f"A stack is already running on {folder.path}. Stop it with `fulmen down`.")
    if record is not None:
        console().print(stack_table(record))


def _runners(text: str) -> FleetRange:
    try:
        return fleet_range(text)
    except ValueError as error:
        raise CommandFailed(f"--runners {text}: {error}.", exit_code=Exit.USAGE) from None


def _ports(given: list[str], names: list[str]) -> dict[str, int]:
    ports: dict[str, int] = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in names or not number.isdigit() or not 0 < int(number) < 65536:
            raise CommandFailed(
                f"--port {text}: must have the form NAME=NUMBER, NAME one of {', '.join(names)}.",
                exit_code=Exit.USAGE,
            )
        ports[name] = int(number)
    return ports


def _follow_start(folder: StackFolder, supervisor: subprocess.Popen[bytes]) -> None:
    """Shows the table of the stack until all services are ready.

    Raises:
        StackError: if the supervisor gives up, or does not come to an end within 4 minutes.
    """
    screen = console()
    with _live(screen) as show:
        record = wait_until_ready(folder, supervisor, show=show)
    _say_ready(screen, record)


@contextlib.contextmanager
def _live(screen: Console) -> Iterator[Callable[[StackRecord], None]]:
    """Yields a function that shows a record: a live table on a terminal, nothing elsewhere."""
    if not screen.is_terminal:
        yield lambda record: None
        return
    with Live(console=screen, refresh_per_second=10, transient=True) as live:
        yield lambda record: live.update(stack_table(record))


TRUSTED_CODE: Final = {"algorithm": "model builders", "runner": "agents"}


def _say_ready(screen: Console, record: StackRecord) -> None:
    screen.print(stack_table(record))
    moved = [
        f"{name} {port} (usual: {usual})"
        for service in record.services
        for name, port in service.ports.items()
        if (usual := DEFAULT_PORTS.get(name.replace("runner-1", "runner"))) not in (None, port)
    ]
    if moved:
        screen.print(f"Default ports in use, replaced by: {', '.join(moved)}.")
    trusting = {
        TRUSTED_CODE[kind]: name
        for kind, settings in DEFAULTS.items()
        for name, level in settings.items()
        if os.environ.get(name, level) == level
    }
    if trusting:
        screen.print(
            f"{' and '.join(trusting).capitalize()} are trusted: they run as you. For code of others set "
            f"{' and '.join(trusting.values())} to sandbox."
        )
    screen.print(f"Ready. Agents call {record.targets['llm_proxy_http']}/v1; the store is {record.targets['store']}.")
    screen.print(f"The console: {record.targets['console_http']}. `fulmen open` opens it, signed in.")


def _open(folder: StackFolder) -> None:
    stack = Deployment(state_dir=folder.path)
    record = folder.read_running()
    if record is not None:
        open_in_browser(record.targets["console_http"], stack.bearer(), stack.project)


def _stay(supervisor: subprocess.Popen[bytes]) -> None:
    console().print("Press Ctrl-C to stop.")
    if supervisor.wait() != 0:  # As long as the stack lives: there is nothing to do but wait for its end or a signal.
        raise CommandFailed("The stack exited unexpectedly: see `fulmen logs supervisor`.")


def _tail(path: Path, lines: int) -> list[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readlines()[-lines:] if lines else []


def _follow(path: Path) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        file.seek(0, os.SEEK_END)
        while True:
            text = file.read()
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                time.sleep(FOLLOW_INTERVAL_S)
