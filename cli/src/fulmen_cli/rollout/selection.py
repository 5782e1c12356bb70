"""`fulmen rollout count`, `update` and `delete`: counts, changes and deletes selected rollouts."""

from __future__ import annotations

import datetime
from typing import Annotated, Final

import typer

from fulmen.messages import timestamp
from fulmen.store.v1 import rollout_selection_pb2 as pb
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import ROLLOUT_FORMS, rollout_name, rollout_names, run_name
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_rows, when, working
from fulmen_cli.rollout.listing import PAGE_SIZE, FilterOption, StateOption, numbers_of

__all__ = ["register"]

NEVER: Final = "never"


def register(rollout: typer.Typer) -> None:
    """Adds the commands to `fulmen rollout`."""
    remote_command(rollout, "count")(count)
    remote_command(rollout, "update")(update)
    remote_command(rollout, "delete")(delete)


async def count(
    connection: Connection,
    run: Annotated[str, typer.Option(help="Only rollouts of this training run.")] = "",
    state: StateOption = None,
    where: FilterOption = "",
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Count the values of this field instead: state, failure_kind, mode, task_type, agent, training_run, "
            "reward, resource_versions, required_labels or metadata. May be repeated."
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Counts rollouts by state and failure, or by the values of fields, in at most two seconds.

    Values are counted over the newest 10,000 rollouts, entries of maps over the newest 500; a count followed by + is a
    minimum.

    Examples:

        fulmen rollout count --run latest

        fulmen rollout count --by reward --by agent --filter 'state = SUCCEEDED'

        fulmen rollout count --filter 'metadata.customer = "a" AND create_time > "2026-03-14T00:00:00Z"'
    """
    request = pb.CountRolloutsRequest(states=numbers_of(state), filter=where, facets=by)
    async with connection.open() as client:
        request.training_run = await run_name(run, connection, client)
        counted = await client.rollouts.CountRollouts(request)
    if output is Output.JSON:
        print_json(as_dict(counted))
        return
    if by:
        rows = [
            (facet.field, each.value or "-", f"{each.count}{'+' if facet.has_more else ''}")
            for facet in counted.facets
            for each in facet.values
        ]
        columns = ("field", "value", "rollouts")
    else:
        rows = [(enum_word(each, "state"), enum_word(each, "failure_kind"), str(each.count)) for each in counted.parts]
        columns = ("state", "failure", "rollouts")
    print_rows(output, columns, rows, messages=counted.parts, empty="", right=("rollouts",))
    console().print(f"{'at least ' if counted.has_more else ''}{counted.count} rollouts in all")


async def update(
    connection: Connection,
    rollout: Annotated[str, typer.Argument(help=f"{ROLLOUT_FORMS}.")],
    priority: Annotated[int | None, typer.Option(help="-100 to 100; higher ones run first.")] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help=f"Time at which it fails unless it has ended, such as 2026-03-14T10:15:00Z; {NEVER}: no deadline."
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Changes a rollout that has not ended; values that are not given are not changed.

    Examples:

        fulmen rollout update 0192f0c1 --priority 50

        fulmen rollout update 0192f0c1 --deadline 2026-03-14T10:15:00Z
    """
    request = pb.UpdateRolloutRequest()
    if priority is not None:
        request.rollout.priority = priority
        request.update_mask.paths.append("priority")
    if deadline is not None:
        request.update_mask.paths.append("deadline_time")
        if deadline != NEVER:
            request.rollout.deadline_time.CopyFrom(timestamp(_moment(deadline)))
    if not request.update_mask.paths:
        raise CommandFailed("Give --priority, --deadline or both.", exit_code=Exit.USAGE)
    async with connection.open() as client:
        request.rollout.name = await rollout_name(rollout, connection, client)
        changed = (await client.rollouts.UpdateRollout(request)).rollout
    if output is Output.JSON:
        print_json(as_dict(changed))
        return
    text = f"{changed.name}: priority {changed.priority}, deadline {when(changed.deadline_time) or NEVER}"
    console().print(text, markup=False, soft_wrap=True)


async def delete(
    connection: Connection,
    rollouts: Annotated[list[str] | None, typer.Argument(help=f"Final rollouts, each {ROLLOUT_FORMS}.")] = None,
    where: Annotated[str, typer.Option("--filter", help="Delete final rollouts that match; * for all.")] = "",
    run: Annotated[str, typer.Option(help="With --filter: only rollouts of this training run.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Permanently deletes rollouts that have ended, with their attempts and spans. Their usage is kept.

    A rollout is kept while another member of its group has not ended, and while its training run is in progress.

    Examples:

        fulmen rollout count --filter 'create_time < "2026-01-01T00:00:00Z"'

        fulmen rollout delete --filter 'create_time < "2026-01-01T00:00:00Z"'

        fulmen rollout delete 0192f0c1-7a6e-7c53-9f3e-0123456789ab
    """
    if bool(rollouts) == bool(where) or (run and not where):
        raise CommandFailed(
            "Give either names of rollouts or a --filter that selects ended ones.", exit_code=Exit.USAGE
        )
    answer = pb.DeleteRolloutsResponse()
    async with connection.open() as client:
        names = await rollout_names(rollouts or (), connection, client)
        request = pb.DeleteRolloutsRequest(filter=where, training_run=await run_name(run, connection, client))
        with working("deleting") as progress:
            for start in range(0, max(1, len(names)), PAGE_SIZE):
                request.names[:] = names[start : start + PAGE_SIZE]
                while True:
                    part = await client.rollouts.DeleteRollouts(request)
                    answer.deleted_count += part.deleted_count
                    answer.kept_count += part.kept_count
                    progress(f"{answer.deleted_count} deleted")
                    request.page_token = part.next_page_token
                    if not request.page_token:
                        break
    if output is Output.JSON:
        print_json(as_dict(answer))
        return
    kept = f", {answer.kept_count} kept: their group or training run has not ended" if answer.kept_count else ""
    console().print(f"{answer.deleted_count} deleted{kept}.")


def _moment(text: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        raise CommandFailed(
            f"--deadline {text}: give a time such as 2026-03-14T10:15:00Z, or {NEVER}.", exit_code=Exit.USAGE
        ) from None
