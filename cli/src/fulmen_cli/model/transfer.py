"""Models on their way to a deployment, from it, and to a hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.client.aio.base import listed
from fulmen.models.base_names import HubName
from fulmen.models.push import PushFailed, hub_repository, push_model, pushed_files
from fulmen.models.transfer import Progress as Report
from fulmen.models.transfer import TransferFailed, Uploaded, download_weights, upload_model
from fulmen.rpc.services import Services
from fulmen.train_toml.train import TrainConfig
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.model.sources import hub_library
from fulmen_cli.output import as_dict, console, print_json, print_rows, when, working
from fulmen_cli.project.commands import project_name

__all__ = ["delete", "download", "is_uploaded", "push", "upload", "uploaded", "with_uploaded_base"]

ProjectOption = Annotated[str, typer.Option(help="Project of the model; by default the token's.")]
BASE_PREFIX: Final = "model:"
VERSION: Final = re.compile(r"(?P<policy>[a-z0-9._-]+)@(?P<version>[a-z0-9._-]+)")
LOCAL: Final = re.compile(r"(.*///?)?(localhost|127\.[0-9.]+|\[::1\])(:\d+)?|unix:.*")
SHOWN_DIGEST: Final = 12
SHOWN_FILES: Final = 5


async def upload(
    connection: Connection,
    folder: Annotated[
        Path, typer.Argument(help="Folder in the format of transformers: config.json, safetensors, tokenizer.")
    ],
    name: Annotated[
        str, typer.Option(help="Name by which runs find the model, of [a-z0-9._-]; without one, its digest.")
    ] = "",
    project: ProjectOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Uploads a model, so that a training on another machine can begin with it.

    Files that the project already has are not sent again. Run the command again to resume an interrupted upload. Pickles,
    Python and hidden files are left out: only safetensors are accepted as weights.

    Examples:

        fulmen model upload ./qwen3-0.6b --name qwen3

        fulmen model upload ./qwen3-0.6b --output json
    """
    if not folder.is_dir():
        raise CommandFailed(f"The folder {folder} does not exist.", exit_code=Exit.NOT_FOUND)
    screen = console()
    screen.quiet = output is Output.JSON
    async with connection.open() as client:
        done = await _uploaded(client, screen, folder, project=project_name(project) if project else "", alias=name)
    if output is Output.JSON:
        print_json({"model": as_dict(done.model), "sent_bytes": done.sent_bytes, "left_out": list(done.left_out)})
        return
    screen.print(
        f'In train.toml: [policy] base = "{BASE_PREFIX}{name or done.model.name.rpartition("/")[2]}"', markup=False
    )


async def uploaded(connection: Connection, project: ProjectOption = "", output: OutputOption = Output.TABLE) -> None:
    """Lists the models that were uploaded, newest first.

    Examples:

        fulmen model uploaded

        fulmen model uploaded --output json
    """
    request = pb.ListModelsRequest(project=project_name(project) if project else "")
    async with connection.open() as client:
        found = [each async for each in listed(client.weights.ListModels, request, "models")]
    rows = [
        (
            ", ".join(each.aliases),
            each.name.rpartition("/")[2][:SHOWN_DIGEST],
            str(each.file_count),
            f"{each.size_bytes / 1e6:,.1f}",
            when(each.create_time),
            when(each.use_time),
        )
        for each in found
    ]
    columns = ("name", "digest", "files", "MB", "uploaded (UTC)", "used (UTC)")
    print_rows(
        output, columns, rows, messages=found, empty="No models.", right=("files", "MB"), spare=("used (UTC)", "files")
    )


async def download(
    connection: Connection,
    name: Annotated[
        str,
        typer.Argument(
            help="Name or digest of an uploaded model, or POLICY@VERSION: its number, latest, best or another alias."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The new folder.")],
    full: Annotated[bool, typer.Option("--full", help="Of a policy trained as adapters: all weights, merged.")] = False,
    project: ProjectOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Downloads a model, or the weights of a trained policy; a policy that was trained as adapters is downloaded as
    adapters.

    Every file is compared with its SHA-256. Until all files have arrived, they are in a folder whose name ends with `.part`.
    Run the command again to resume an interrupted download.

    Examples:

        fulmen model download solver@latest ./solver

        fulmen model download solver@12 ./solver-12 --full

        fulmen model download qwen3 ./qwen3
    """
    screen = console()
    screen.quiet = output is Output.JSON
    where = project_name(project) if project else connection.project
    async with connection.open() as client:
        with _shown(screen, f"Downloading {name}") as report:
            try:
                done = await download_weights(
                    client.weights, _source(name, where, full=full), folder, on_progress=report
                )
            except TransferFailed as error:
                raise CommandFailed(str(error), exit_code=Exit.CONFLICT) from None
            except OSError as error:
                raise CommandFailed(f"{error.filename or folder} cannot be written: {error.strerror}.") from None
    if output is Output.JSON:
        print_json({"source": as_dict(done.source), "digest": done.digest, "size_bytes": done.size_bytes})
        return
    came = done.source.policy_version or done.source.model
    screen.print(
        f"{folder}: {came}, {done.size_bytes / 1e6:,.1f} MB, every file verified.", markup=False, soft_wrap=True
    )


async def delete(
    connection: Connection,
    name: Annotated[str, typer.Argument(help="Name or digest of an uploaded model.")],
    project: ProjectOption = "",
) -> None:
    """Deletes an uploaded model. A model that a run starts from cannot be deleted until the run has ended.

    Examples:

        fulmen model delete qwen3
    """
    where = project_name(project) if project else connection.project
    async with connection.open() as client:
        await client.weights.DeleteModel(pb.DeleteModelRequest(name=f"{where}/models/{name}"))
    console().print(f"Deleted {name}.", markup=False)


def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that `fulmen model export` has written.")],
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="organisation/name on the hub.")],
    public: Annotated[bool, typer.Option("--public", help="Create it public; by default it is private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be uploaded; do not contact the hub.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Uploads an exported model to a repository of the hub, which is created if it does not exist.

    The hub and the token are configured as for huggingface_hub: HF_ENDPOINT, HF_TOKEN, `hf auth login`.

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
        text = f"{folder} contains no model: write one with `fulmen model export`."
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


def is_uploaded(connection: Connection, config: TrainConfig) -> bool:
    """Returns whether a training begins with a folder that the algorithm service, on another machine, does not have."""
    target = connection.targets().algorithm
    return bool(config.policy.path) and connection.names_services and not LOCAL.fullmatch(target)


async def with_uploaded_base(
    connection: Connection, client: Services, config: TrainConfig, screen: Console
) -> TrainConfig:
    """Uploads the folder that a training begins with, where the algorithm service is on another machine."""
    if not is_uploaded(connection, config):
        return config
    done = await _uploaded(client, screen, Path(config.policy.path))
    base = f"{BASE_PREFIX}{done.model.name.rpartition('/')[2]}"
    return replace(config, policy=replace(config.policy, path="", base=base))


async def _uploaded(client: Services, screen: Console, folder: Path, *, project: str = "", alias: str = "") -> Uploaded:
    with _shown(screen, f"Uploading {folder.name or folder}") as report:
        try:
            done = await upload_model(client.weights, folder, project=project, alias=alias, on_progress=report)
        except TransferFailed as error:
            raise CommandFailed(str(error)) from None
        except OSError as error:
            raise CommandFailed(f"{error.filename or folder} cannot be read: {error.strerror}.") from None
    model = done.model
    sent = f"{done.sent_bytes / 1e6:,.1f} MB sent" if done.sent_bytes else "nothing to send"
    screen.print(
        f"{model.name}: {model.file_count} files, {model.size_bytes / 1e6:,.1f} MB, {sent}.",
        markup=False,
        soft_wrap=True,
    )
    if done.left_out:
        more = f" and {len(done.left_out) - SHOWN_FILES} more" if len(done.left_out) > SHOWN_FILES else ""
        text = f"Left out, because they are not data files of a model: {', '.join(done.left_out[:SHOWN_FILES])}{more}."
        screen.print(text, markup=False, soft_wrap=True)
    return done


def _pushed(folder: Path, name: HubName, *, public: bool) -> str:
    hub = hub_library()
    try:
        with working(f"Uploading to {name.repository}…"):
            return push_model(hub, folder, name, public=public)
    except PushFailed as error:
        raise CommandFailed(str(error)) from None


def _source(name: str, project: str, *, full: bool) -> pb.WeightSource:
    if match := VERSION.fullmatch(name):
        resource, version = f"resources/policy.{match['policy']}", match["version"]
        named = f"{resource}/versions/{version}" if version.isdecimal() else f"{resource}/aliases/{version}"
        form = pb.WEIGHT_FORM_FULL if full else pb.WEIGHT_FORM_UNSPECIFIED
        return pb.WeightSource(policy_version=named, project=project, form=form)
    if full:
        raise CommandFailed("--full is for policies, POLICY@VERSION.", exit_code=Exit.USAGE)
    return pb.WeightSource(model=f"{project}/models/{name}")


@contextmanager
def _shown(screen: Console, text: str) -> Iterator[Report]:
    """Shows the progress of a transfer, on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=screen.quiet or not screen.is_terminal) as shown:
        bar = shown.add_task(text, total=None)
        yield lambda done, total: shown.update(bar, completed=done, total=total)
