"""`fulmen usage`: what model calls used and cost."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Final

import typer

from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import rollout_name, run_name
from fulmen_cli.output import print_rows, when
from fulmen_cli.project.commands import project_name

__all__ = ["register"]

PAGE_SIZE: Final = 1000
SECONDS_PER_DAY: Final = 86_400
MICROS: Final = 1e6
COLUMNS: Final = ("calls", "failed", "prompt tokens", "of them cached", "completion tokens", "dollars")


class By(StrEnum):
    """What usage is grouped by."""

    ALL = "all"
    MODEL = "model"
    BACKEND = "backend"
    RUN = "run"
    ROLLOUT = "rollout"
    ATTEMPT = "attempt"
    AGENT = "agent"
    PROJECT = "project"
    HOUR = "hour"
    DAY = "day"


GROUPINGS: Final = {
    By.ALL: pb.USAGE_GROUPING_UNSPECIFIED,
    By.MODEL: pb.USAGE_GROUPING_MODEL,
    By.BACKEND: pb.USAGE_GROUPING_BACKEND,
    By.RUN: pb.USAGE_GROUPING_TRAINING_RUN,
    By.ROLLOUT: pb.USAGE_GROUPING_ROLLOUT,
    By.ATTEMPT: pb.USAGE_GROUPING_ATTEMPT,
    By.AGENT: pb.USAGE_GROUPING_AGENT,
}
PERIODS: Final = {By.HOUR: pb.USAGE_PERIOD_HOUR, By.DAY: pb.USAGE_PERIOD_DAY}
MAX_SERIES: Final = 50


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "usage")(usage)


async def usage(
    connection: Connection,
    project: Annotated[str, typer.Option(help="Only this project; by default the token's.")] = "",
    run: Annotated[str, typer.Option(help="Only this training run.")] = "",
    rollout: Annotated[str, typer.Option(help="Only this rollout.")] = "",
    by: Annotated[By, typer.Option(help="Group by.")] = By.MODEL,
    days: Annotated[float | None, typer.Option(min=0, help="Only the last N days.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows the tokens that model calls used and their cost by the proxy's price table.

    Examples:

        fulmen usage

        fulmen usage --run demo --by rollout

        fulmen usage --by day --days 7
    """
    if by in PERIODS or by is By.PROJECT:
        if rollout:
            raise CommandFailed(f"--by {by} counts more than one rollout: leave out --rollout.", exit_code=Exit.USAGE)
        await _in_time(connection, project_name(project) if project else "", run, by, days, output)
        return
    project = project_name(project) if project else ""
    request = pb.GetUsageRequest(
        project=project,
        group_by=GROUPINGS[by],
        page_size=PAGE_SIZE,
    )
    if days is not None:
        request.start_time.FromSeconds(int(time.time() - days * SECONDS_PER_DAY))
    found: list[pb.UsageGroup] = []
    async with connection.open() as client:
        request.training_run = await run_name(run, connection, client, project=project)
        request.rollout = await rollout_name(rollout, connection, client) if rollout else ""
        while True:
            page = await client.usage.GetUsage(request)
            found += page.groups
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
    rows = [(_shown(each, by), *_numbers(each.usage)) for each in found]
    print_rows(output, (by.value, *COLUMNS), rows, messages=found, empty="No model calls.")


async def _in_time(connection: Connection, project: str, run: str, by: By, days: float | None, output: Output) -> None:
    """Shows usage by period, newest first, or by project."""
    grouping = pb.USAGE_GROUPING_PROJECT if by is By.PROJECT else pb.USAGE_GROUPING_UNSPECIFIED
    request = pb.GetUsageSeriesRequest(
        project=project, period=PERIODS.get(by, pb.USAGE_PERIOD_DAY), group_by=grouping, max_series=MAX_SERIES
    )
    if days is not None:
        request.start_time.FromSeconds(int(time.time() - days * SECONDS_PER_DAY))
    async with connection.open() as client:
        request.training_run = await run_name(run, connection, client, project=project)
        found = await client.usage.GetUsageSeries(request)
    if by is By.PROJECT:
        series = [*found.series, *([found.others] if found.HasField("others") else [])]
        rows = [(each.name or f"{found.other_count} others", *_numbers(each.total)) for each in series]
        print_rows(output, (by.value, *COLUMNS), rows, messages=series, empty="No model calls.")
        return
    points = [point for each in found.series for point in each.points][::-1]
    rows = [(when(point.start_time)[: 16 if by is By.HOUR else 10], *_numbers(point.usage)) for point in points]
    print_rows(output, (f"{by.value} (UTC)", *COLUMNS), rows, messages=points, empty="No model calls.")


def _shown(group: pb.UsageGroup, by: By) -> str:
    return "all" if by is By.ALL else group.name or "(none)"


def _numbers(usage: pb.Usage) -> tuple[str, ...]:
    counts = (
        usage.request_count,
        usage.failure_count,
        usage.prompt_token_count,
        usage.cached_token_count,
        usage.completion_token_count,
    )
    return (*(f"{count:,}" for count in counts), f"{usage.cost_micros / MICROS:,.4f}")
