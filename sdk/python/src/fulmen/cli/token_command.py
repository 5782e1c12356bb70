"""`fulmen token`: signs tokens, and makes signing keys."""

from __future__ import annotations

import secrets
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from fulmen.cli.command import StateDirOption, local_command
from fulmen.cli.exits import CommandFailed, Exit
from fulmen.ids import DEFAULT_PROJECT
from fulmen.local.credentials import SECRET_BYTES, Credentials
from fulmen.local.record import DEFAULT_STATE_DIR
from fulmen.local.tokens import issue_token

__all__ = ["register"]

SECONDS_PER_DAY: Final = 86_400
MIN_KEY_BYTES: Final = 32


class TokenRole(StrEnum):
    """Roles for which the command signs tokens; attempt keys come from the store alone."""

    ADMIN = "admin"
    SERVICE = "service"
    RUNNER = "runner"
    CLIENT = "client"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    local_command(app, "token")(token)


def token(
    role: Annotated[TokenRole, typer.Option(help="What the token may do.")] = TokenRole.CLIENT,
    subject: Annotated[str, typer.Option(help="Who it is for; shows up in logs.")] = "fulmen-token",
    project: Annotated[str, typer.Option(help="The project that a client token is bound to.")] = DEFAULT_PROJECT,
    days: Annotated[float, typer.Option(min=0.001, max=3650, help="How long it is good.")] = 30,
    signing_key_file: Annotated[
        Path | None, typer.Option(help="The deployment's signing key; by default that of the local stack.")
    ] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Prints a new signing key instead.")] = False,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIR),
) -> None:
    """Signs a token with the deployment's key and prints it.

    Examples:

        fulmen token --role runner --days 90

        fulmen token --role client --signing-key-file /run/secrets/signing.key

        fulmen token --new-key > signing.key
    """
    if new_key:
        sys.stdout.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
        return
    path = signing_key_file or Credentials(state_dir.resolve()).signing_key_file
    if not path.is_file():
        raise CommandFailed(
            f"There is no signing key {path}: name one with --signing-key-file, or start a stack with `fulmen up`.",
            exit_code=Exit.NOT_FOUND,
        )
    key = path.read_text(encoding="utf-8").strip()
    if len(key.encode()) < MIN_KEY_BYTES:
        raise CommandFailed(f"The signing key in {path} is shorter than {MIN_KEY_BYTES} bytes.", exit_code=Exit.USAGE)
    sys.stdout.write(
        issue_token(key, role.value, subject=subject, ttl_s=days * SECONDS_PER_DAY, project=project) + "\n"
    )
