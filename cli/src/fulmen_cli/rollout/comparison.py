"""`fulmen rollout compare`: two sets of rollouts of the same tasks, task by task."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fulmen.store.v1 import rollout_comparison_pb2 as pb
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.names import run_name, short_name
from fulmen_cli.output import as_dict, console, print_json, print_rows
from fulmen_cli.rollout.listing import FilterOption

__all__ = ["register"]

SHOWN_CHARS: Final = 60


def register(rollout: typer.Typer) -> None:
    """Adds the command to `fulmen rollout`."""
    remote_command(rollout, "compare")(compare)


async def compare(
    connection: Connection,
    run: Annotated[str, typer.Option(help="Training run of the baseline.")] = "",
    where: FilterOption = "",
    group_prefix: Annotated[str, typer.Option(help="Prefix of the baseline's group ids, such as validation/1/.")] = "",
    with_run: Annotated[str, typer.Option(help="Training run of the candidate; by default the baseline's.")] = "",
    with_filter: Annotated[str, typer.Option(help="Filter of the candidate; by default the baseline's.")] = "",
    with_group_prefix: Annotated[
        str, typer.Option(help="Prefix of the candidate's group ids; by default the baseline's.")
    ] = "",
    failure_reward: Annotated[
        float | None, typer.Option(help="Reward of rollouts that failed without one; by default they are left out.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of tasks listed.")] = 20,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compares a candidate with a baseline on the tasks that both have: wins, losses, mean difference, worst tasks first.

    The interval of 95 % is a percentile bootstrap over tasks.

    Examples:

        fulmen rollout compare --run latest --group-prefix validation/1/ --with-group-prefix validation/9/

        fulmen rollout compare --filter 'resource_versions.prompt = "resources/prompt.sums/versions/1"' \
          --with-filter 'resource_versions.prompt = "resources/prompt.sums/versions/2"'
    """
    async with connection.open() as client:
        names = [await run_name(name, connection, client) for name in (run, with_run or run)]
        request = pb.CompareRolloutsRequest(
            baseline=pb.RolloutSide(training_run=names[0], filter=where, group_id_prefix=group_prefix),
            candidate=pb.RolloutSide(
                training_run=names[1],
                filter=with_filter or where,
                group_id_prefix=with_group_prefix or group_prefix,
            ),
            failure_reward=failure_reward,
            page_size=limit,
        )
        found = await client.rollouts.CompareRollouts(request)
    if output is Output.JSON:
        print_json(as_dict(found))
        return
    rows = [
        (
            each.input.decode("utf-8", "replace")[:SHOWN_CHARS],
            f"{each.baseline_reward:g}",
            f"{each.candidate_reward:g}",
            f"{each.candidate_reward - each.baseline_reward:+g}",
            short_name(each.candidate_rollouts[0]),
        )
        for each in found.pairs
    ]
    columns = ("task", "baseline", "candidate", "difference", "a rollout of the candidate")
    print_rows(
        output, columns, rows, messages=found.pairs, empty="The two sides have no task in common with rewards on both.",
        right=("baseline", "candidate", "difference"),
    )  # fmt: skip
    _print_summary(found)


def _print_summary(found: pb.CompareRolloutsResponse) -> None:
    screen = console()
    if found.HasField("difference_low"):
        interval = f" ({found.difference_low:+.3f} to {found.difference_high:+.3f}, 95 %)"
    else:
        interval = ""
    screen.print(
        f"{found.win_count} wins, {found.loss_count} losses, {found.tie_count} ties on {found.task_count} tasks; mean "
        f"{found.baseline_mean:.3f} -> {found.candidate_mean:.3f}, difference {found.mean_difference:+.3f}{interval}",
        soft_wrap=True,
    )
    left_out = found.baseline.unscored_count + found.candidate.unscored_count
    unpaired = found.baseline.unpaired_task_count + found.candidate.unpaired_task_count
    if left_out or unpaired:
        screen.print(f"Left out: {left_out} rollouts without a reward, {unpaired} tasks of one side only.")
