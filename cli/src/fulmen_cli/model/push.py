"""`fulmen model push`: an exported model to a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fulmen.models.base_names import HubName
from fulmen.models.push import PushFailed, hub_repository, push_model, pushed_files
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.model.sources import hub_library
from fulmen_cli.output import console, print_json, working

__all__ = ["push"]


def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that `fulmen model export` has written.")],
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="organisation/name on the hub.")],
    public: Annotated[bool, typer.Option("--public", help="Create it public; by default it is private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be uploaded; ask no hub.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Uploads an exported model to a repository of the hub, which is created if need be.

    Hub and token are those of huggingface_hub: HF_ENDPOINT, HF_TOKEN, `hf auth login`.

    Examples:

        fulmen model push ./solver acme/solver --dry-run

        fulmen model push ./solver acme/solver
    """
    try:
        name = hub_repository(repository)
    except ValueError as error:
        raise CommandFailed(str(error), exit_code=Exit.USAGE) from None
    try:
        files = pushed_files(folder)
    except FileNotFoundError:
        text = f"{folder} holds no model: write one with `fulmen model export`."
        raise CommandFailed(text, exit_code=Exit.NOT_FOUND) from None
    url = "" if dry_run else _pushed(folder, name, public=public)
    if output is Output.JSON:
        print_json(
            {
                "repository": name.repository,
                "revision": name.revision,
                "uploaded": not dry_run,
                "url": url,
                "files": [{"name": file, "size_bytes": size} for file, size in files.items()],
            }
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file")
    table.add_column("bytes", justify="right")
    for file, size in files.items():
        table.add_row(file, str(size))
    console().print(table)
    if dry_run:
        console().print(f"Nothing was uploaded to {name.repository} (--dry-run).", markup=False)
    else:
        console().print(f"Uploaded: {url}", markup=False, soft_wrap=True)


def _pushed(folder: Path, name: HubName, *, public: bool) -> str:
    hub = hub_library()
    try:
        with working(f"Uploading to {name.repository}…"):
            return push_model(hub, folder, name, public=public)
    except PushFailed as error:
        raise CommandFailed(str(error)) from None
