"""`fulmen model export` and `merge-lora`: a trained model as a folder that other programs load."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from fulmen.models.card import Lineage, read_lineage, write_card
from fulmen.policy_versions import PolicyVersion
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.model.versions import find_version, local_folder, whole_weights
from fulmen_cli.output import console, print_json, working

__all__ = ["VersionArgument", "export", "merge_lora"]

ERROR_SHOWN_CHARS: Final = 1000

VersionArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="POLICY, POLICY@VERSION or POLICY@ALIAS, such as solver@best.")
]
FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model is written; a new folder.")]


async def export(
    connection: Connection, model: VersionArgument, folder: FolderArgument, output: OutputOption = Output.TABLE
) -> None:
    """Writes a model with tokenizer, configuration and a model card (README.md) to a folder.

    The weights are read from the algorithm service's storage, which must be readable from this machine.

    Examples:

        fulmen model export solver@best ./solver

        fulmen model export solver@12 ./solver-12
    """
    async with connection.open() as client:
        version = await find_version(model, connection, client)

        async def copy(target: Path, aside: Path) -> None:
            source = await whole_weights(version, connection, client, aside=aside)
            await asyncio.to_thread(shutil.copytree, source, target)

        await _write(folder, await read_lineage(client, version), copy, output)


async def merge_lora(
    connection: Connection,
    model: VersionArgument,
    folder: FolderArgument,
    adapter: Annotated[str, typer.Option(help="Adapter of this role; by default the only one.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Writes a complete model with a LoRA adapter merged into its base model; otherwise as `export`.

    Needs the algorithm service's package on this machine.

    Example:

        fulmen model merge-lora planner@7 ./planner --adapter solver
    """
    async with connection.open() as client:
        version = await find_version(model, connection, client)
        chosen = _adapter(version, adapter)

        async def merge(target: Path, aside: Path) -> None:
            del aside
            base = local_folder(version.base_model, version)
            await _merged(base, local_folder(version.path, version) / chosen, target)

        await _write(folder, await read_lineage(client, version), merge, output)


async def _write(folder: Path, lineage: Lineage, fill: Callable[[Path, Path], Awaitable[None]], output: Output) -> None:
    """Writes a folder of a model with its card; it appears whole or not at all."""
    if folder.exists():
        raise CommandFailed(f"{folder} already exists: name a new folder.", exit_code=Exit.CONFLICT)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder.parent) as aside:
        target = Path(aside) / "model"
        with working(f"Writing {lineage.version.short}…"):
            await fill(target, Path(aside) / "rebuilt")
        write_card(target, lineage)
        target.rename(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if output is Output.JSON:
        print_json({"model": lineage.version.name, "folder": str(folder.resolve()), "size_bytes": size})
    else:
        console().print(f"{lineage.version.short} is in {folder} ({size} bytes).", markup=False, soft_wrap=True)


def _adapter(version: PolicyVersion, given: str) -> str:
    if not version.adapters:
        raise CommandFailed(f"{version.short} has no adapters: use `fulmen model export`.", exit_code=Exit.USAGE)
    chosen = given or (version.adapters[0] if len(version.adapters) == 1 else "")
    if chosen not in version.adapters:
        known = ", ".join(version.adapters)
        raise CommandFailed(
            f"{version.short} has the adapters {known}: choose one with --adapter.", exit_code=Exit.USAGE
        )
    return chosen


async def _merged(base: Path, adapter: Path, target: Path) -> None:
    """Merges in a process of its own, which loads torch."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "fulmen_algorithm.weights.merging", str(base), str(adapter), str(target)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        shown = errors.decode(errors="replace").strip()[-ERROR_SHOWN_CHARS:]
        raise CommandFailed(f"The adapter could not be merged (is fulmen-algorithm installed?):\n{shown}")
