"""`fulmen rollout dead` and `fulmen rollout retry`: lists and retries dead rollouts."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fulmen.ids import uuid7
from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import ROLLOUT_FORMS, rollout_names, run_name, short_name
from fulmen_cli.output import enum_word, print_rows, when, working
from fulmen_cli.rollout.listing import PAGE_SIZE, listed, print_first_failure

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
    request = rollout_service_pb2.ListRolloutsRequest(states=[rollout_pb2.ROLLOUT_STATE_FAILED], filter=where)
    async with connection.open() as client:
        request.training_run = await run_name(run, connection, client)
        found = await listed(client, request, limit)
    rows = [
        (short_name(each.name), enum_word(each, "failure_kind"), str(each.ended_attempt_count), each.task_type or each.agent,
         when(each.create_time), when(each.end_time))
        for each in found
    ]  # fmt: skip
    columns = ("rollout", "failure", "attempts", "task type or agent", "created (UTC)", "ended (UTC)")
    print_rows(output, columns, rows, messages=found, empty="No dead rollouts.", spare=columns[4:1:-1])
    print_first_failure(output, found)


async def retry(
    connection: Connection,
    rollouts: Annotated[list[str] | None, typer.Argument(help=f"Final rollouts, each {ROLLOUT_FORMS}.")] = None,
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
        raise CommandFailed("Give either names of rollouts or a --filter that selects dead ones.", exit_code=Exit.USAGE)
    async with connection.open() as client:
        created = (
            await _by_name(client, await rollout_names(rollouts, connection, client))
            if rollouts
            else await _by_filter(client, where, await run_name(run, connection, client))
        )
    rows = [
        (short_name(each.metadata.get(RETRY_OF, "")), short_name(each.name), enum_word(each, "state"))
        for each in created
    ]
    columns = ("ran", "runs again as", "state")
    print_rows(output, columns, rows, messages=created, empty="Nothing to retry.", spare=columns[2:])


async def _by_name(client: Services, names: list[str]) -> list[rollout_pb2.Rollout]:
    created: list[rollout_pb2.Rollout] = []
    with working("running again") as progress:
        for start in range(0, len(names), PAGE_SIZE):
            request = rollout_service_pb2.RetryRolloutsRequest(
                names=names[start : start + PAGE_SIZE], request_id=str(uuid7())
            )
            created += (await client.rollouts.RetryRollouts(request)).rollouts
            progress(f"{len(created)} of {len(names)} run again")
    return created


async def _by_filter(client: Services, where: str, run: str) -> list[rollout_pb2.Rollout]:
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
