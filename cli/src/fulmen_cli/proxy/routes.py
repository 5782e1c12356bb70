"""`fulmen proxy route` and `fulmen proxy promote`: where calls go, and how that changes while agents run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import Parse, ParseError

from fulmen.kinds import REDACTIONS
from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_rows

__all__ = [
    "ModelArgument",
    "backend_name",
    "delete",
    "parse_override",
    "parse_share",
    "parse_target",
    "promote",
    "put",
    "rollback",
    "route_facts",
    "route_name",
    "raise_problems",
    "recording_text",
    "show",
    "show_route",
    "split",
    "target_text",
]

MAX_SECONDS = 10**9
ModelArgument = Annotated[str, typer.Argument(help="Public model name.")]


class Balancing(StrEnum):
    """How a backend is chosen among replicas."""

    STICKY = "sticky"
    PREFIX_CACHE = "prefix-cache"
    LEAST_OUTSTANDING = "least-outstanding"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """The settings of a route."""

    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="BACKEND[:MODEL][@VERSION][=WEIGHT]: the backend, its model name (by default the public one), the version of --policy that it serves, its weight (by default 1). May be repeated.",
        ),
    ] = None
    policy: Annotated[str, typer.Option(help="Policy that the targets serve; without one, no tokens are captured.")] = (
        ""
    )
    balancing: Annotated[
        Balancing | None, typer.Option(help="Load balancing between replicas; by default attempts are sticky.")
    ] = None
    fallback: Annotated[
        list[str] | None, typer.Option("--fallback", help="Route to use if no target answers. May be repeated.")
    ] = None
    deadline: Annotated[float | None, typer.Option(help="Timeout for the first byte of an answer, seconds.")] = None
    hedge: Annotated[float | None, typer.Option(help="Delay before a second backend is tried, seconds.")] = None
    cache: Annotated[bool, typer.Option("--cache", help="Cache answers to identical requests.")] = False
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override", help="MODE=JSON: request fields to set in train, validation or test; null removes one."
        ),
    ] = None


async def put(
    connection: Connection,
    model: ModelArgument,
    options: RouteOptions,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="The whole route as JSON, as printed by `show -o json`; - for standard input."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Adds or replaces a route; all proxies apply it within a second.

    Examples:

        fulmen proxy route put arithmetic --policy arithmetic --target vllm-0:policy@7 --target vllm-1:policy@7

        fulmen proxy route put judge --target openai:gpt-4o --fallback local --deadline 60 --cache

        fulmen proxy route put arithmetic --file route.json
    """
    problems: list[str] = []
    if file is not None:
        if options != RouteOptions():
            problems.append("--file cannot be combined with other options.")
        route = _read(file, model, problems)
    else:
        route = route_pb2.Route(
            name=route_name(model),
            targets=[parse_target(each, policy=options.policy, problems=problems) for each in options.target or ()],
            overrides=[parse_override(each, problems) for each in options.override or ()],
            fallbacks=[route_name(each) for each in options.fallback or ()],
            deadline=_duration("--deadline", options.deadline, problems),
            hedge_delay=_duration("--hedge", options.hedge, problems),
            cached=options.cache,
        )
        if options.balancing is not None:
            route.balancing = route_pb2.Balancing.Value(f"BALANCING_{options.balancing.name}")
        if not options.target:
            problems.append("At least one --target, or --file, is required.")
    raise_problems(problems)
    async with connection.open() as client:
        answer = await client.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
    show_route(answer.route, output)


async def show(connection: Connection, model: ModelArgument, output: OutputOption = Output.TABLE) -> None:
    """Shows a route.

    Example:

        fulmen proxy route show arithmetic
    """
    async with connection.open() as client:
        answer = await client.routes.GetRoute(route_service_pb2.GetRouteRequest(name=route_name(model)))
    show_route(answer.route, output)


async def delete(connection: Connection, model: ModelArgument) -> None:
    """Deletes a route; calls in flight finish.

    Example:

        fulmen proxy route delete judge
    """
    async with connection.open() as client:
        await client.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=route_name(model)))
    console().print(f"Deleted {route_name(model)}.", markup=False)


async def rollback(
    connection: Connection,
    model: ModelArgument,
    to: Annotated[int | None, typer.Option(min=1, help="Version; by default the previous one.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Rolls a route back to an earlier version, as a new version.

    Example:

        fulmen proxy route rollback arithmetic --to 3
    """
    request = route_service_pb2.RollbackRouteRequest(name=route_name(model), version=to)
    async with connection.open() as client:
        answer = await client.routes.RollbackRoute(request)
    show_route(answer.route, output)


async def split(
    connection: Connection,
    model: ModelArgument,
    shares: Annotated[
        list[str], typer.Argument(metavar="SHARES...", help="BACKEND=WEIGHT, or @VERSION=WEIGHT of a policy version.")
    ],
    output: OutputOption = Output.TABLE,
) -> None:
    """Sets the weights of a route's targets, for A/B tests and canaries; attempts are sticky.

    Examples:

        fulmen proxy route split judge openai=90 local=10

        fulmen proxy route split arithmetic @7=95 @8=5
    """
    problems: list[str] = []
    weights: dict[str, int] = {}
    version_weights: dict[int, int] = {}
    for share in shares:
        match parse_share(share, problems):
            case (int() as version, weight) if version not in version_weights:
                version_weights[version] = weight
            case (str() as backend, weight) if backend not in weights:
                weights[backend] = weight
            case tuple():
                problems.append(f"{share}: given twice.")
    if weights and version_weights:
        problems.append("Give backends or versions, not both.")
    raise_problems(problems)
    request = route_service_pb2.SplitTrafficRequest(
        name=route_name(model), weights=weights, version_weights=version_weights
    )
    async with connection.open() as client:
        answer = await client.routes.SplitTraffic(request)
    show_route(answer.route, output)


async def promote(
    connection: Connection,
    policy: Annotated[str, typer.Argument(help="Such as arithmetic.")],
    version: Annotated[int, typer.Argument(min=1, help="Version to serve.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Sets the version that a policy's targets serve; the backends must already have its weights.

    Example:

        fulmen proxy promote arithmetic 8
    """
    request = route_service_pb2.PromoteVersionRequest(policy=policy, policy_version=version)
    async with connection.open() as client:
        answer = await client.routes.PromoteVersion(request)
    if answer.replaced_version:
        text = f"Version {version} is lower than {answer.replaced_version}, which the targets served before."
        console(stderr=True).print(text, markup=False)
    routes = list(answer.routes)
    rows = [
        (route.name.removeprefix("routes/"), str(route.version), "; ".join(map(target_text, route.targets)))
        for route in routes
    ]
    print_rows(output, ("model", "version", "targets"), rows, messages=routes, empty="No routes.")


def _read(file: Path, model: str, problems: list[str]) -> route_pb2.Route:
    route = route_pb2.Route()
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        Parse(text, route)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--file {file}: cannot be read: {error}.")
    except ParseError as error:
        problems.append(f"--file {file}: not a route: {error}.")
    if route.name and route.name != route_name(model):
        problems.append(f"--file {file}: is the route {route.name}, not {route_name(model)}.")
    route.name = route_name(model)
    route.version = 0
    return route


def _duration(option: str, seconds: float | None, problems: list[str]) -> Duration | None:
    if seconds is None:
        return None
    if not 0 < seconds < MAX_SECONDS:
        problems.append(f"{option} {seconds:g}: must be a positive number of seconds.")
        return None
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9) % 10**9)


def show_route(route: route_pb2.Route, output: Output) -> None:
    """Prints a route."""
    if output is Output.JSON:
        print_json(as_dict(route))
        return
    screen = console()
    for name, value in [("route", route.name), ("version", str(route.version)), *route_facts(route)]:
        screen.print(f"{name:<14}{value}", markup=False, soft_wrap=True)
    screen.print()
    rows = [
        (each.backend.removeprefix("backends/"), each.backend_model, str(each.weight), each.policy,
         str(each.policy_version) if each.policy else "")
        for each in route.targets
    ]  # fmt: skip
    columns = ("backend", "its model", "weight", "policy", "policy version")
    print_rows(output, columns, rows, messages=list(route.targets), empty="")


TARGET: Final = re.compile(r"(?P<backend>[^:@=\s]+)(?::(?P<model>\S+?))?(?:@(?P<version>\d+))?(?:=(?P<weight>\d+))?")
TARGET_FORM: Final = "BACKEND[:MODEL][@VERSION][=WEIGHT]"
DEFAULT_WEIGHT: Final = 1
MAX_INT32: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1


def route_name(given: str) -> str:
    """Returns `routes/{model}` for either form of a name."""
    return given if given.startswith("routes/") else f"routes/{given}"


def backend_name(given: str) -> str:
    """Returns `backends/{id}` for either form of a name."""
    return given if given.startswith("backends/") else f"backends/{given}"


def parse_target(text: str, *, policy: str, problems: list[str]) -> route_pb2.RouteTarget:
    """Reads `BACKEND[:MODEL][@VERSION][=WEIGHT]`; without a weight it is 1. What is wrong is added to `problems`."""
    match = TARGET.fullmatch(text)
    if match is None:
        problems.append(f"--target {text}: must have the form {TARGET_FORM}.")
        return route_pb2.RouteTarget()
    if match["version"] and not policy:
        problems.append(f"--target {text}: a version needs --policy.")
    return route_pb2.RouteTarget(
        backend=backend_name(match["backend"]),
        backend_model=match["model"] or "",
        weight=_number(match["weight"], MAX_INT32, f"--target {text}", problems) if match["weight"] else DEFAULT_WEIGHT,
        policy=policy,
        policy_version=_number(match["version"] or "0", MAX_INT64, f"--target {text}", problems),
    )


def parse_override(text: str, problems: list[str]) -> route_pb2.ModeOverride:
    """Reads `MODE=JSON`; the proxy checks the mode. Problems are added to `problems`."""
    mode, mark, fields = text.partition("=")
    try:
        is_object = isinstance(json.loads(fields), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not mark or not is_object:
        problems.append(
            f"--override {text}: must have the form MODE=JSON with a JSON object, such as 'validation={{\"temperature\": 0}}'."
        )
    return route_pb2.ModeOverride(mode=mode, request_fields_json=fields)


def parse_share(text: str, problems: list[str]) -> tuple[str | int, int] | None:
    """Reads `BACKEND=WEIGHT` or `@VERSION=WEIGHT`: the backend's name or the version, and the weight.

    None if it is neither, which is added to `problems`.
    """
    name, mark, weight = text.rpartition("=")
    is_version = name.startswith("@")
    if not mark or not name or not weight.isdecimal() or (is_version and not name[1:].isdecimal()):
        problems.append(f"{text}: must have the form BACKEND=WEIGHT or @VERSION=WEIGHT.")
        return None
    of = _number(name[1:], MAX_INT64, text, problems) if is_version else backend_name(name)
    return of, _number(weight, MAX_INT32, text, problems)


def raise_problems(problems: Sequence[str]) -> None:
    """Reports all problems of the arguments together.

    Raises:
        CommandFailed: if anything is.
    """
    if problems:
        raise CommandFailed("\n  ".join(["Invalid options.", *problems]), exit_code=Exit.USAGE)


def target_text(target: route_pb2.RouteTarget) -> str:
    """Writes a target in a few words."""
    words = [target.backend.removeprefix("backends/")]
    if target.backend_model:
        words.append(f"model {target.backend_model}")
    if target.weight:
        words.append(f"weight {target.weight}")
    if target.policy:
        words.append(f"policy {target.policy} version {target.policy_version}")
    return " ".join(words)


def route_facts(route: route_pb2.Route) -> list[tuple[str, str]]:
    """Returns what is special about a route, by name; what is unset is left out."""
    facts = [
        ("file", route.file),
        ("project", route.project.removeprefix("projects/")),
        ("balancing", enum_word(route, "balancing").replace("_", " ")),
        ("fallbacks", ", ".join(name.removeprefix("routes/") for name in route.fallbacks)),
        ("deadline", f"{route.deadline.ToMilliseconds() / 1000:g} s" if route.HasField("deadline") else ""),
        ("hedge after", f"{route.hedge_delay.ToMilliseconds() / 1000:g} s" if route.HasField("hedge_delay") else ""),
        ("cached", "yes" if route.cached else ""),
        ("recording", recording_text(route.recording) if route.HasField("recording") else ""),
        ("overrides", "; ".join(f"{each.mode} {each.request_fields_json}" for each in route.overrides)),
    ]
    return [(name, value) for name, value in facts if value]


def recording_text(recording: route_pb2.Recording) -> str:
    """Writes in a few words what a route records."""
    rules = [*(recording.redact or REDACTIONS), *(each.name for each in recording.patterns)]
    days = recording.retention.seconds / 86_400 or 30
    return f"{recording.sample_rate:.4g} of calls, redacts {', '.join(rules)}, {days:g} days"


def _number(text: str, maximum: int, where: str, problems: list[str]) -> int:
    # Longer numbers are not parsed: more digits than these are out of every range.
    value = int(text) if len(text) <= len(str(maximum)) else maximum + 1
    if value > maximum:
        problems.append(f"{where}: number out of range.")
        return 0
    return value
