"""`fulmen model push`: an exported model to a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from fulmen.base_names import HUB_PREFIX, HubName
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.model.sources import CONFIG, hub_library
from fulmen_cli.output import console, print_json, working

__all__ = ["push"]

# Weights and what is read beside them; nothing that runs code, and nothing of a working folder.
PUSHED: Final = frozenset({".safetensors", ".json", ".jinja", ".txt", ".model", ".md", ".png"})


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
        name = HubName.parse(f"{HUB_PREFIX}{repository.removeprefix(HUB_PREFIX)}")
    except ValueError:
        text = f"{repository!r} is no repository: write it as organisation/name."
        raise CommandFailed(text, exit_code=Exit.USAGE) from None
    files = _files(folder)
    url = "" if dry_run else _upload(folder, name, files, public=public)
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


def _files(folder: Path) -> dict[str, int]:
    """Returns the files that are uploaded, at the top of the folder, with their sizes in bytes."""
    if not (folder / CONFIG).is_file():
        text = f"{folder} holds no model: write one with `fulmen model export`."
        raise CommandFailed(text, exit_code=Exit.NOT_FOUND)
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    return {path.name: path.stat().st_size for path in found if path.suffix in PUSHED}


def _upload(folder: Path, name: HubName, files: dict[str, int], *, public: bool) -> str:
    hub = hub_library()
    api = hub.HfApi()
    try:
        with working(f"Uploading to {name.repository}…"):
            api.create_repo(name.repository, private=not public, exist_ok=True)
            done = api.upload_folder(
                repo_id=name.repository,
                folder_path=folder,
                allow_patterns=[*files],
                commit_message="Uploaded by fulmen model push",
                revision=name.revision,
            )
    except hub.errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            text = f"The hub does not let you write to {name.repository}: `hf auth login`, or set HF_TOKEN to a token that may."
            raise CommandFailed(text) from None
        raise CommandFailed(f"The hub answered {error.response.status_code}; try again.") from None
    except (hub.errors.HTTPError, OSError, RuntimeError):
        raise CommandFailed("The hub cannot be reached; what was uploaded is kept, try again.") from None
    return str(done.commit_url)
