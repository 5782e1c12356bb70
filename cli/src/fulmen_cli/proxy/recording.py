"""`fulmen proxy route record`: recording of an app's own calls on a route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from fulmen.kinds import NO_REDACTION, REDACTIONS
from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.proxy.routes import ModelArgument, raise_problems, route_name, show_route

__all__ = ["record"]

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """What a route records."""

    sample: Annotated[float, typer.Option(help="Share of the calls, over 0 and at most 1.")] = 1.0
    redact: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(REDACTIONS)}, or {NO_REDACTION}. May be repeated. By default all of them."),
    ] = None
    pattern: Annotated[
        list[str] | None,
        typer.Option(help="NAME=REGEX: a match is replaced by [NAME]. May be repeated."),
    ] = None
    retention_days: Annotated[float, typer.Option(help="How long calls are kept, days.")] = 30
    off: Annotated[bool, typer.Option("--off", help="Record nothing any more; what is recorded stays.")] = False


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


def _pattern(text: str, problems: list[str]) -> route_pb2.RedactionPattern:
    name, mark, expression = text.partition("=")
    if not mark:
        problems.append(f"--pattern {text}: must have the form NAME=REGEX.")
    return route_pb2.RedactionPattern(name=name, expression=expression)
