"""`fulmen proxy route canary` and `record`: changes of one part of a route, which keep the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from fulmen.kinds import NO_REDACTION, REDACTIONS
from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.proxy.routes import ModelArgument, raise_problems, route_name, show_route

__all__ = ["canary", "record"]

WHOLE: Final = 10_000
PERCENT: Final = 100
SECONDS_PER_DAY: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """What a route records."""

    sample: Annotated[float, typer.Option(help="Share of the calls, greater than 0 and at most 1.")] = 1.0
    redact: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(REDACTIONS)}, or {NO_REDACTION}. May be repeated. By default all of them."),
    ] = None
    pattern: Annotated[
        list[str] | None,
        typer.Option(help="NAME=REGEX: a match is replaced by [NAME]. May be repeated."),
    ] = None
    retention_days: Annotated[float, typer.Option(help="How long calls are kept, days.")] = 30
    off: Annotated[bool, typer.Option("--off", help="Stop recording; recorded calls are kept.")] = False


async def canary(
    connection: Connection,
    model: ModelArgument,
    policy: Annotated[str, typer.Option(help="Trained policy, which has a route of its own name.")],
    percent: Annotated[float, typer.Option(min=0, max=PERCENT, help="Its share of the calls.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Gives a policy a share of a route's calls; the other targets keep their proportions.

    `fulmen proxy route rollback` undoes it. Attempts and conversations stay with their target.

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
        targets = _shared(route.targets, serving, policy_model=policy, percent=percent)
        route.ClearField("targets")
        route.targets.extend(targets)
        route.rolling_versions = route.rolling_versions or own.rolling_versions
        answer = await client.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
    show_route(answer.route, output)


async def record(
    connection: Connection, model: ModelArgument, options: RecordingOptions, output: OutputOption = Output.TABLE
) -> None:
    """Records the calls of an app on a route: those without an attempt. Headers are never recorded.

    Examples:

        fulmen proxy route record assistant --sample 0.1

        fulmen proxy route record assistant --redact email --redact phone --pattern 'customer=C-\\d{6}' --retention-days 7

        fulmen proxy route record assistant --off
    """
    problems: list[str] = []
    if options.off and options != RecordingOptions(off=True):
        problems.append("--off cannot be combined with other options.")
    if not 0 <= options.retention_days < 10**6:
        problems.append(f"--retention-days {options.retention_days:g}: number out of range.")
    patterns = [_pattern(each, problems) for each in options.pattern or ()]
    raise_problems(problems)
    async with connection.open() as client:
        request = route_service_pb2.GetRouteRequest(name=route_name(model))
        route = (await client.routes.GetRoute(request)).route
        route.ClearField("recording")
        if not options.off:
            route.recording.CopyFrom(
                route_pb2.Recording(sample_rate=options.sample, redact=options.redact, patterns=patterns)
            )
            route.recording.retention.seconds = round(options.retention_days * SECONDS_PER_DAY)
        answer = await client.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
    show_route(answer.route, output)


def _shared(
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


def _pattern(text: str, problems: list[str]) -> route_pb2.RedactionPattern:
    name, mark, expression = text.partition("=")
    if not mark:
        problems.append(f"--pattern {text}: must have the form NAME=REGEX.")
    return route_pb2.RedactionPattern(name=name, expression=expression)
