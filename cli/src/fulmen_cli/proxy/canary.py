"""`fulmen proxy route canary`: a policy takes a share of the traffic of another route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.proxy.routes import ModelArgument, route_name, show_route

__all__ = ["canary", "shared"]

WHOLE: Final = 10_000
PERCENT: Final = 100


async def canary(
    connection: Connection,
    model: ModelArgument,
    policy: Annotated[str, typer.Option(help="Trained policy, which has a route of its own name.")],
    percent: Annotated[float, typer.Option(min=0, max=PERCENT, help="Its share of the calls.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Gives a policy a share of a route's calls; the other targets share the rest as before.

    `fulmen proxy route rollback` undoes it. Conversations that the app names stay with their target, and so do attempts.

    Examples:

        fulmen proxy route canary assistant --policy support --percent 10

        fulmen proxy route canary assistant --policy support --percent 100
    """
    name = route_name(model)
    async with connection.open() as client:
        route = (await client.routes.GetRoute(route_service_pb2.GetRouteRequest(name=name))).route
        own = (await client.routes.GetRoute(route_service_pb2.GetRouteRequest(name=route_name(policy)))).route
        serving = [each for each in own.targets if each.policy]
        if not serving or own.name == name:
            raise CommandFailed(f"{own.name} serves no policy that another route could use.", exit_code=Exit.USAGE)
        targets = shared(route.targets, serving, policy_model=policy, percent=percent)
        route.ClearField("targets")
        route.targets.extend(targets)
        answer = await client.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
    show_route(answer.route, output)


def shared(
    targets: Sequence[route_pb2.RouteTarget],
    serving: Sequence[route_pb2.RouteTarget],
    *,
    policy_model: str,
    percent: float,
) -> list[route_pb2.RouteTarget]:
    """Returns the targets of a route in which a policy has its share of the weight.

    Args:
        targets: Targets of the route.
        serving: Targets of the policy's own route.
        policy_model: Public name of that route.
        percent: The policy's share of the calls.
    """
    policies = {each.policy for each in serving}
    others = [each for each in targets if each.policy not in policies]
    held = sum(each.weight for each in others)
    its_own = round(WHOLE * percent / PERCENT) if others else WHOLE
    found = []
    for each in others:
        part = each.weight / held if held else 1 / len(others)
        kept = route_pb2.RouteTarget()
        kept.CopyFrom(each)
        kept.weight = round((WHOLE - its_own) * part)
        found.append(kept)
    for each in serving:
        added = route_pb2.RouteTarget()
        added.CopyFrom(each)
        added.backend_model = each.backend_model or policy_model
        added.weight = round(its_own / len(serving))
        found.append(added)
    return found
