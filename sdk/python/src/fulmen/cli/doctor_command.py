"""`fulmen doctor`: says what on this machine would keep a local stack from running."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from rich.text import Text

from fulmen.cli.command import Output, OutputOption, StateDirOption, local_command
from fulmen.cli.exits import Exit
from fulmen.cli.output import console, print_json
from fulmen.local.errors import ExtraMissingError
from fulmen.local.ports import DEFAULT_PORTS, is_free
from fulmen.local.postgres import EmbeddedPostgresError, find_binaries
from fulmen.local.record import DEFAULT_STATE_DIR, StackFolder
from fulmen.local.services import require_installed

__all__ = ["register"]

LEAST_PYTHON: Final = (3, 11)
LEAST_DISK_BYTES: Final = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at; `ok` is None where it is only worth knowing."""

    what: str
    ok: bool | None
    text: str


def register(app: typer.Typer) -> None:
    """Adds the command."""
    local_command(app, "doctor")(doctor)


def doctor(state_dir: StateDirOption = Path(DEFAULT_STATE_DIR), output: OutputOption = Output.TABLE) -> None:
    """Checks what a local stack needs: Python, packages, the database's programs, disk, ports.

    Exits with 1 if something is missing.

    Example:

        fulmen doctor
    """
    folder = StackFolder(state_dir.resolve())
    findings = [_python(), _packages(), _database(), _disk(folder.path), _stack(folder), _ports(folder)]
    if output is Output.JSON:
        print_json([{"what": each.what, "ok": each.ok, "text": each.text} for each in findings])
    else:
        for each in findings:
            mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("note", "yellow")}[each.ok]
            console().print(Text.assemble((mark, style), f"  {each.what:<10} {each.text}"))
    if any(each.ok is False for each in findings):
        raise typer.Exit(Exit.FAILED)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(what="python", ok=sys.version_info[:2] >= LEAST_PYTHON, text=f"{version}, {sys.executable}")


def _packages() -> Finding:
    try:
        require_installed()
    except ExtraMissingError as error:
        return Finding(what="packages", ok=False, text=str(error))
    return Finding(what="packages", ok=True, text="the four services are installed")


def _database() -> Finding:
    try:
        return Finding(what="database", ok=True, text=f"PostgreSQL in {find_binaries()}")
    except EmbeddedPostgresError as error:
        return Finding(what="database", ok=False, text=str(error))


def _disk(path: Path) -> Finding:
    existing = next(each for each in (path, *path.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    return Finding(what="disk", ok=free >= LEAST_DISK_BYTES, text=f"{free / 1024**3:.1f} GiB free at {existing}")


def _stack(folder: StackFolder) -> Finding:
    running = folder.is_running()
    return Finding(what="stack", ok=None, text=f"{'one runs' if running else 'none runs'} on {folder.path}")


def _ports(folder: StackFolder) -> Finding:
    taken = [f"{name} {port}" for name, port in DEFAULT_PORTS.items() if not is_free(port)]
    if not taken:
        return Finding(what="ports", ok=True, text="the usual ports are free")
    whose = "by the stack that runs" if folder.is_running() else "by something else; `fulmen up` takes others"
    return Finding(what="ports", ok=None, text=f"in use {whose}: {', '.join(taken)}")
