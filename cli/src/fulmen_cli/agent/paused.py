"""`fulmen agent resume`: leases rollouts of a paused agent version again."""

from __future__ import annotations

from typing import Annotated

import typer

from fulmen.store.v1 import project_service_pb2 as pb
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.output import as_dict, console, print_json
from fulmen_cli.project.commands import project_name

__all__ = ["register"]


def register(group: typer.Typer) -> None:
    """Adds the command to `fulmen agent`."""
    remote_command(group, "resume")(resume)


async def resume(
    connection: Connection,
    agent: Annotated[str, typer.Argument(help="Agent version, resources/agent.NAME/versions/N; see `fulmen queue`.")],
    project: Annotated[str, typer.Option(help="Its project; by default the token's.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Resumes an agent version that is paused because runners died under it. Needs an admin token.

    Its queued rollouts are leased again. If runners still die, it is paused again.

    Example:

        fulmen agent resume resources/agent.arithmetic/versions/3
    """
    request = pb.ResumeAgentRequest(project=project_name(project) if project else "", agent=agent)
    async with connection.open() as client:
        answer = await client.projects.ResumeAgent(request)
    if output is Output.JSON:
        print_json(as_dict(answer))
        return
    console().print(f"Resumed {agent}." if answer.was_paused else f"{agent} was not paused.")
