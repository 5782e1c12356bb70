"""Options that select rollouts, pages of them, and which of them failed first."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.text import Text

from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen_cli.command import Output
from fulmen_cli.output import console, working
from fulmen_cli.rollout.figures import first_failure

__all__ = ["PAGE_SIZE", "FilterOption", "StateOption", "listed", "numbers_of", "print_first_failure"]

PAGE_SIZE: Final = 1000


class State(StrEnum):
    """States of a rollout to filter by."""

    QUEUED = "queued"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


StateOption = Annotated[list[State] | None, typer.Option(help="Only rollouts in this state. May be repeated.")]
FilterOption = Annotated[
    str,
    typer.Option(
        "--filter",
        help="Only rollouts that match (AIP-160): name, state, failure_kind, mode, priority, group_id, task_type, "
        "agent, training_run, create_time, end_time, ended_attempt_count, reward, duration, prompt_token_count, "
        "completion_token_count, token_count, cost_micros, metadata.KEY, required_labels.KEY, resource_versions.KEY; "
        "input:TEXT and output:TEXT search tasks and answers, FIELD:* is true if the field is set; AND, OR (binds first), NOT.",
    ),
]


def numbers_of(states: Sequence[State] | None) -> list[rollout_pb2.RolloutState]:
    """Returns the states as in the contract."""
    return [rollout_pb2.RolloutState.Value(f"ROLLOUT_STATE_{each.upper()}") for each in states or ()]


async def listed(
    client: Services, request: rollout_service_pb2.ListRolloutsRequest, limit: int
) -> list[rollout_pb2.Rollout]:
    """Reads pages until `limit` rollouts or the end; a short page is not the end."""
    found: list[rollout_pb2.Rollout] = []
    with working("searching") as progress:
        while len(found) < limit:
            request.page_size = min(PAGE_SIZE, limit - len(found))
            page = await client.rollouts.ListRollouts(request)
            found += page.rollouts
            request.page_token = page.next_page_token
            progress(f"{len(found)} found")
            if not page.next_page_token:
                break
    return found


def print_first_failure(output: Output, rollouts: Sequence[rollout_pb2.Rollout]) -> None:
    """Prints below a table of rollouts which one failed first and what failed in it."""
    text = first_failure(rollouts, separator="\n  ")
    if text and output is Output.TABLE:
        console().print(Text(text), no_wrap=True, overflow="ellipsis")
