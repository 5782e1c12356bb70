"""`fulmen audit`: who did what to the deployment."""

from __future__ import annotations

import json
import time
from typing import Annotated, Final

import typer

from fulmen.store.v1 import audit_service_pb2 as pb
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.output import print_rows, when
from fulmen_cli.project.commands import project_name

__all__ = ["register"]

PAGE_SIZE: Final = 1000
SECONDS_PER_DAY: Final = 86_400


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "audit")(audit)


async def audit(
    connection: Connection,
    project: Annotated[str, typer.Option(help="Only this project; by default all that the token has access to.")] = "",
    actor: Annotated[str, typer.Option(help="Only of this actor, the subject of a token.")] = "",
    action: Annotated[str, typer.Option(help="Only this rpc or service, such as IssueToken or ProjectService.")] = "",
    errors: Annotated[bool, typer.Option("--errors", help="Only calls that were refused or failed.")] = False,
    days: Annotated[float | None, typer.Option(min=0, help="Only the last N days.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number, newest first.")] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows the administrative calls to the store, newest first. Requires an admin token.

    Example:

        fulmen audit --action IssueToken --days 7
    """
    request = pb.ListAuditEntriesRequest(
        project=project_name(project) if project else "", actor=actor, action=action, errors_only=errors
    )
    if days is not None:
        request.start_time.FromSeconds(int(time.time() - days * SECONDS_PER_DAY))
    found: list[pb.AuditEntry] = []
    async with connection.open() as client:
        while True:
            request.page_size = min(PAGE_SIZE, limit - len(found))
            page = await client.audit.ListAuditEntries(request)
            found += page.entries
            if not page.next_page_token or len(found) >= limit:
                break
            request.page_token = page.next_page_token
    rows = [
        (when(each.time), each.actor or "(nobody)", each.action, _result(each), each.project, _object(each))
        for each in found
    ]
    columns = ("when (UTC)", "actor", "action", "result", "project", "request")
    print_rows(output, columns, rows, messages=found, empty="No entries.", spare=("request", "project"))


def _result(entry: pb.AuditEntry) -> str:
    more = f" (+{entry.left_out_count})" if entry.left_out_count else ""
    return ("ok" if entry.code == "OK" else entry.reason or entry.code) + more


def _object(entry: pb.AuditEntry) -> str:
    asked = json.loads(entry.request_json or "{}")
    return " ".join(f"{path}={_short(value)}" for path, value in asked.items() if value not in ("", []))


def _short(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    return str(value[0]) if len(value) == 1 else f"{value[0]}+{len(value) - 1}"
