"""`fulmen rollout dead` and `fulmen rollout retry`: lists and retries dead rollouts."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fulmen.client import Client
from fulmen.ids import uuid7
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import enum_word, print_rows, when, working
from fulmen_cli.rollout.listing import PAGE_SIZE, listed, rollout_name
from fulmen_cli.run.states import run_name

__all__ = ["register"]

EVERYTHING: Final = "*"
RETRY_OF: Final = "fulmen.retry_of"


def register(rollout: typer.Typer) -> None:
    """Adds the commands to `fulmen rollout`."""
    remote_command(rollout, "dead")(dead)
    remote_command(rollout, "retry")(retry)


async def dead(
    connection: Connection,
    run: Annotated[str, typer.Option(help="Only rollouts of this training run.")] = "",
    where: Annotated[str, typer.Option("--filter", help="Only rollouts that also match this filter (AIP-160).")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of results.")] = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists dead rollouts, which failed and are not retried, newest first.

    Examples:

        fulmen rollout dead

        fulmen rollout dead --filter 'failure_kind = TIMEOUT AND create_time > "2026-03-14T00:00:00Z"'
    """
    request = rollout_service_pb2.ListRolloutsRequest(
        training_run=run_name(run, connection), states=[rollout_pb2.ROLLOUT_STATE_FAILED], filter=where
    )
    async with connection.open() as client:
        found = await listed(client, request, limit)
    rows = [
        (each.name, enum_word(each, "failure_kind"), str(each.ended_attempt_count), each.task_type or each.agent,
         when(each.create_time), when(each.end_time))
        for each in found
    ]  # fmt: skip
    columns = ("rollout", "failure", "attempts", "task type or agent", "created (UTC)", "ended (UTC)")
    print_rows(output, columns, rows, messages=found, empty="No dead rollouts.")


async def retry(
    connection: Connection,
    rollouts: Annotated[
        list[str] | None, typer.Argument(help="projects/PROJECT/rollouts/UUID, or the UUIDs; all final.")
    ] = None,
    where: Annotated[
        str, typer.Option("--filter", help="Retry dead rollouts that match and were not retried yet; * for all.")
    ] = "",
    run: Annotated[str, typer.Option(help="With --filter: only rollouts of this training run.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Retries rollouts, each as a new rollout in a group of its own.

    With --filter a dead rollout is retried at most once, even if the command is repeated; by name every time.

    Examples:

        fulmen rollout retry 0192f0c1-7a6e-7c53-9f3e-0123456789ab

        fulmen rollout retry --filter 'failure_kind = INFRA'

        fulmen rollout retry --filter '*' --run arithmetic-20260314-101500-x7k2-2-grpo
    """
    if bool(rollouts) == bool(where) or (run and not where):
        raise CommandFailed("Name rollouts, or select dead ones with --filter: one of them.", exit_code=Exit.USAGE)
    async with connection.open() as client:
        created = (
            await _by_name(client, [rollout_name(each, connection) for each in rollouts])
            if rollouts
            else await _by_filter(client, where, run_name(run, connection))
        )
    rows = [(each.metadata.get(RETRY_OF, ""), each.name, enum_word(each, "state")) for each in created]
    print_rows(output, ("ran", "runs again as", "state"), rows, messages=created, empty="Nothing to retry.")


async def _by_name(client: Client, names: list[str]) -> list[rollout_pb2.Rollout]:
    created: list[rollout_pb2.Rollout] = []
    with working("running again") as progress:
        for start in range(0, len(names), PAGE_SIZE):
            request = rollout_service_pb2.RetryRolloutsRequest(
                names=names[start : start + PAGE_SIZE], request_id=str(uuid7())
            )
            created += (await client.rollouts.RetryRollouts(request)).rollouts
            progress(f"{len(created)} of {len(names)} run again")
    return created


async def _by_filter(client: Client, where: str, run: str) -> list[rollout_pb2.Rollout]:
    created: list[rollout_pb2.Rollout] = []
    with working("running again") as progress:
        while True:
            request = rollout_service_pb2.RetryRolloutsRequest(
                filter=where or EVERYTHING, training_run=run, request_id=str(uuid7())
            )
            answer = await client.rollouts.RetryRollouts(request)
            created += answer.rollouts
            progress(f"{len(created)} run again")
            if not answer.has_more:
                return created
