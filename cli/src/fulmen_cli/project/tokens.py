"""`fulmen token`: issues, revokes and lists tokens at the store; signs tokens and makes keys without it."""

from __future__ import annotations

import secrets
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from fulmen.ids import training_run_name
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen_cli.command import Output, OutputOption, StateDirOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit, reported
from fulmen_cli.local.credentials import SECRET_BYTES, Credentials, attempt_secrets, issue_token
from fulmen_cli.local.record import DEFAULT_STATE_DIR
from fulmen_cli.output import as_dict, enum_word, print_json, print_rows, when
from fulmen_cli.project.commands import project_name

__all__ = ["register"]

SECONDS_PER_DAY: Final = 86_400
MIN_KEY_BYTES: Final = 32
PAGE_SIZE: Final = 1000

HELP: Final = """Tokens. `issue`, `revoke` and `list` use the store, which is the usual way.

Without a subcommand, signs a token with the deployment's key, to bootstrap a deployment. The store does not
know such a token: it cannot be listed or revoked, and is valid until it expires.

Examples:

    fulmen token issue --role client --project team-a --subject ann

    fulmen token --role runner --days 90

    fulmen token --role client --signing-key-file /run/secrets/signing.key

    fulmen token --new-key > signing.key

    fulmen token --attempt-key-secret --signing-key-file signing.key > attempt.key
"""


class TokenRole(StrEnum):
    """Roles of tokens; only the store issues attempt keys."""

    ADMIN = "admin"
    SERVICE = "service"
    RUNNER = "runner"
    CLIENT = "client"
    READER = "reader"
    ENGINE = "engine"
    RANK = "rank"


RoleOption = Annotated[TokenRole, typer.Option(help="Role of the token.")]
SubjectOption = Annotated[str, typer.Option(help="Owner of the token, as shown in logs.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    tokens = typer.Typer(help=HELP, invoke_without_command=True, rich_markup_mode="markdown")
    tokens.callback()(sign)
    app.add_typer(tokens, name="token")
    remote_command(tokens, "issue")(issue)
    remote_command(tokens, "revoke")(revoke)
    remote_command(tokens, "list")(list_tokens)


def sign(
    context: typer.Context,
    role: RoleOption = TokenRole.CLIENT,
    subject: SubjectOption = "fulmen-token",
    project: Annotated[
        str,
        typer.Option(
            help="Project of the token, `*` for all; by default all for admin, service and runner, the default project "
            "for client and reader."
        ),
    ] = "",
    days: Annotated[float, typer.Option(min=0.001, max=3650, help="Lifetime, days.")] = 30,
    signing_key_file: Annotated[
        Path | None, typer.Option(help="The deployment's signing key; by default the key of the local stack.")
    ] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Prints a new signing key instead.")] = False,
    attempt_key_secret: Annotated[
        bool, typer.Option("--attempt-key-secret", help="Prints the LLM proxy's secret of attempt keys instead.")
    ] = False,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIR),
) -> None:
    """Signs a token with the deployment's key and prints it, unless there is a subcommand."""
    if context.invoked_subcommand is not None:
        return
    with reported():
        if new_key:
            sys.stdout.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
            return
        if role in (TokenRole.ENGINE, TokenRole.RANK):
            raise CommandFailed(
                f"A token of role {role} names a training run: issue it with `fulmen token issue --role {role} --run RUN`.",
                exit_code=Exit.USAGE,
            )
        key = _signing_key(signing_key_file or Credentials(state_dir.resolve()).signing_key_file)
        if attempt_key_secret:
            sys.stdout.write(attempt_secrets(key) + "\n")
            return
        reach = project_name(project) if project else None
        token = issue_token(key, role.value, subject=subject, ttl_s=days * SECONDS_PER_DAY, project=reach)
        sys.stdout.write(token + "\n")


async def issue(
    connection: Connection,
    role: RoleOption,
    subject: SubjectOption,
    project: Annotated[
        str, typer.Option(help="Project of the token, such as team-a; `*` for all projects.")
    ] = "default",
    days: Annotated[
        float | None,
        typer.Option(min=0.001, max=3650, help="Lifetime, days; by default 30, and ten minutes for engine and rank."),
    ] = None,
    run: Annotated[str, typer.Option(help="Training run of an engine or of ranks: its name or id.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Issues a token and prints it once; its id, needed to revoke it, is printed on standard error.

    Examples:

        fulmen token issue --role client --project team-a --subject ann

        fulmen token issue --role runner --project '*' --subject runners --days 90

        fulmen token issue --role engine --project team-a --run arithmetic --subject gpu-7

        fulmen token issue --role rank --project team-a --run arithmetic --subject gpu-8
    """
    request = pb.IssueTokenRequest(
        project=project_name(project),
        role=pb.TokenRole.Value(f"TOKEN_ROLE_{role.value.upper()}"),
        subject=subject,
        training_run=training_run_name(project_name(project), run) if run and "/" not in run else run,
    )
    if days is not None:
        request.ttl.FromSeconds(round(days * SECONDS_PER_DAY))
    async with connection.open() as client:
        issued = await client.projects.IssueToken(request)
    if output is Output.JSON:
        print_json(as_dict(issued))
        return
    sys.stdout.write(issued.token + "\n")
    sys.stderr.write(f"token id {issued.token_id}, valid until {when(issued.info.expire_time)} (UTC)\n")


async def revoke(
    connection: Connection, token_id: Annotated[str, typer.Argument(help="Id of the token; see `fulmen token list`.")]
) -> None:
    """Revokes a token; all services reject it within five seconds.

    Examples:

        fulmen token revoke 158JYtRcgkr7zU1J6MNpZA
    """
    async with connection.open() as client:
        await client.projects.RevokeToken(pb.RevokeTokenRequest(token_id=token_id))
    sys.stderr.write(f"revoked {token_id}\n")


async def list_tokens(
    connection: Connection,
    project: Annotated[str, typer.Option(help="Only tokens of this project; `*` for tokens of all projects.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists issued tokens that have not expired, newest first, without their secrets.

    Examples:

        fulmen token list --project team-a
    """
    found: list[pb.TokenInfo] = []
    request = pb.ListTokensRequest(project=project_name(project) if project else "", page_size=PAGE_SIZE)
    async with connection.open() as client:
        while True:
            page = await client.projects.ListTokens(request)
            found += page.tokens
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
    rows = [
        (
            each.token_id,
            enum_word(each, "role"),
            each.project,
            each.subject,
            when(each.expire_time),
            when(each.revoke_time) if each.HasField("revoke_time") else "",
        )
        for each in found
    ]
    columns = ("token id", "role", "project", "subject", "expires (UTC)", "revoked (UTC)")
    print_rows(output, columns, rows, messages=found, empty="No tokens.")


def _signing_key(path: Path) -> str:
    if not path.is_file():
        raise CommandFailed(
            f"The signing key {path} does not exist: name one with --signing-key-file, or start a stack with `fulmen up`.",
            exit_code=Exit.NOT_FOUND,
        )
    key = path.read_text(encoding="utf-8").strip()
    if len(key.encode()) < MIN_KEY_BYTES:
        raise CommandFailed(f"The signing key in {path} is shorter than {MIN_KEY_BYTES} bytes.", exit_code=Exit.USAGE)
    return key
