"""`fulmen secret`: sets, lists and removes the secrets of a project. No command shows a value or takes one as an argument."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from fulmen.secret_names import MAX_VALUE_BYTES, VENDORS, is_backend_key, name_problem
from fulmen.store.v1 import secret_service_pb2 as pb
from fulmen.training.agent_secrets import list_secrets
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import console, print_rows, when
from fulmen_cli.project.commands import project_name

__all__ = ["register"]

NameArgument = Annotated[
    str,
    typer.Argument(
        help="Name of the secret. With capitals, the variable of agents that name it in `secrets`; without, the key of "
        "backends with this `key_name`."
    ),
]
ProjectOption = Annotated[str, typer.Option(help="Project of the secret; by default the token's.")]
PROMPT: Final = "Value (not shown): "


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = new_group("Secrets of agents, and keys of backends.")
    remote_command(group, "set")(set_secret)
    remote_command(group, "list")(list_command)
    remote_command(group, "remove")(remove)
    app.add_typer(group, name="secret")


async def set_secret(
    connection: Connection,
    name: NameArgument,
    from_env: Annotated[
        bool,
        typer.Option(
            "--from-env", help="Take the value from the variable NAME, or a vendor's usual one, such as OPENAI_API_KEY."
        ),
    ] = False,
    from_file: Annotated[Path | None, typer.Option(help="Take the value from a file.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host that a backend's key may be sent to. May be repeated. By default the host of a well-known vendor."
        ),
    ] = None,
    project: ProjectOption = "",
) -> None:
    """Creates or replaces a secret. Without an option, the value is read from standard input, or prompted for.

    Attempts that start from now on use the new value, and so does the proxy within seconds. The store keeps it
    encrypted, and it cannot be read back.

    Examples:

        fulmen secret set WEATHER_KEY

        fulmen secret set WEATHER_KEY --from-env

        pass show weather | fulmen secret set WEATHER_KEY

        fulmen secret set openai --from-env

        fulmen secret set my-vendor --from-file key.txt --host api.example.com
    """
    if problem := name_problem(name):
        raise CommandFailed(f"{name!r} {problem}.", exit_code=Exit.USAGE)
    request = pb.SetSecretRequest(
        project=project_name(project) if project else "",
        name=name,
        hosts=_hosts(name, host or []),
        value=_value(name, from_env=from_env, from_file=from_file),
    )
    async with connection.open() as client:
        await client.secrets.SetSecret(request)
    where = f"; the proxy sends it to {', '.join(request.hosts)} only" if request.hosts else ""
    console().print(f"Set {name}{where}.", markup=False, soft_wrap=True)


async def list_command(
    connection: Connection, project: ProjectOption = "", output: OutputOption = Output.TABLE
) -> None:
    """Lists the secrets of a project by name, without values.

    Examples:

        fulmen secret list

        fulmen secret list --project team-a --output json
    """
    async with connection.open() as client:
        found = await list_secrets(client, project_name(project) if project else "")
    rows = [
        (
            each.name,
            "agents" if not each.hosts else "the proxy",
            ", ".join(each.hosts),
            when(each.create_time),
            when(each.update_time),
        )
        for each in found
    ]
    columns = ("name", "for", "hosts", "created (UTC)", "set (UTC)")
    print_rows(output, columns, rows, messages=list(found), empty="No secrets.")


async def remove(connection: Connection, name: NameArgument, project: ProjectOption = "") -> None:
    """Permanently deletes a secret.

    Examples:

        fulmen secret remove WEATHER_KEY
    """
    request = pb.DeleteSecretRequest(project=project_name(project) if project else "", name=name)
    async with connection.open() as client:
        await client.secrets.DeleteSecret(request)
    console().print(f"Removed {name}.", markup=False)


def _hosts(name: str, given: list[str]) -> list[str]:
    """Returns the hosts of a secret.

    Raises:
        CommandFailed: If they are missing, or are given for a variable of agents.
    """
    if not is_backend_key(name):
        if given:
            text = f"--host: {name} is a variable of agents. Names of backends' keys have no capitals, such as openai."
            raise CommandFailed(text, exit_code=Exit.USAGE)
        return []
    if not given and name in VENDORS:
        return [VENDORS[name].host]
    if not given:
        text = f"{name} is a backend's key: name the hosts that it may be sent to with --host HOST."
        raise CommandFailed(text, exit_code=Exit.USAGE)
    return given


def _value(name: str, *, from_env: bool, from_file: Path | None) -> bytes:
    """Returns the value, without a final newline.

    Raises:
        CommandFailed: If two sources are named, or the source has no value.
    """
    if from_env and from_file is not None:
        raise CommandFailed("Give one of --from-env and --from-file, not both.", exit_code=Exit.USAGE)
    if from_env:
        return _from_environment(name)
    if from_file is not None:
        try:
            with from_file.open("rb") as file:
                value = file.read(MAX_VALUE_BYTES + 1)
        except OSError as error:
            raise CommandFailed(f"{from_file} cannot be read: {error.strerror}.", exit_code=Exit.NOT_FOUND) from None
    elif sys.stdin.isatty():
        value = getpass.getpass(PROMPT).encode()
    else:
        value = sys.stdin.buffer.read(MAX_VALUE_BYTES + 1)
    return value.removesuffix(b"\n").removesuffix(b"\r")


def _from_environment(name: str) -> bytes:
    if is_backend_key(name) and name not in VENDORS:
        text = f"--from-env: {name} is not a well-known vendor ({', '.join(sorted(VENDORS))}). Use --from-file or standard input."
        raise CommandFailed(text, exit_code=Exit.USAGE)
    variable = VENDORS[name].variable if is_backend_key(name) else name
    if not os.environ.get(variable):
        raise CommandFailed(f"--from-env: the variable {variable} is not set.", exit_code=Exit.NOT_FOUND)
    return os.environ[variable].encode()
