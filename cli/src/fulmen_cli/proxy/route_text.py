"""Routes as people write and read them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from fulmen.llm_proxy.v1 import route_pb2
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import enum_word

__all__ = ["backend_name", "parse_override", "parse_share", "parse_target", "route_facts", "route_name", "settled",
           "target_text"]  # fmt: skip

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
        problems.append(f"--target {text}: is not {TARGET_FORM}.")
        return route_pb2.RouteTarget()
    if match["version"] and not policy:
        problems.append(f"--target {text}: a version is that of a policy: give --policy too.")
    return route_pb2.RouteTarget(
        backend=backend_name(match["backend"]),
        backend_model=match["model"] or "",
        weight=_number(match["weight"], MAX_INT32, f"--target {text}", problems) if match["weight"] else DEFAULT_WEIGHT,
        policy=policy,
        policy_version=_number(match["version"] or "0", MAX_INT64, f"--target {text}", problems),
    )


def parse_override(text: str, problems: list[str]) -> route_pb2.ModeOverride:
    """Reads `MODE=JSON`; whether the mode is one, the proxy says. What is wrong is added to `problems`."""
    mode, mark, fields = text.partition("=")
    try:
        is_object = isinstance(json.loads(fields), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not mark or not is_object:
        problems.append(
            f"--override {text}: is not MODE=JSON with a JSON object, such as 'validation={{\"temperature\": 0}}'."
        )
    return route_pb2.ModeOverride(mode=mode, request_fields_json=fields)


def parse_share(text: str, problems: list[str]) -> tuple[str | int, int] | None:
    """Reads `BACKEND=WEIGHT` or `@VERSION=WEIGHT`: the backend's name or the version, and the weight.

    None if it is neither, which is added to `problems`.
    """
    name, mark, weight = text.rpartition("=")
    is_version = name.startswith("@")
    if not mark or not name or not weight.isdecimal() or (is_version and not name[1:].isdecimal()):
        problems.append(f"{text}: is neither BACKEND=WEIGHT nor @VERSION=WEIGHT.")
        return None
    of = _number(name[1:], MAX_INT64, text, problems) if is_version else backend_name(name)
    return of, _number(weight, MAX_INT32, text, problems)


def settled(problems: Sequence[str]) -> None:
    """Tells everything that is wrong with what was typed, at once.

    Raises:
        CommandFailed: if anything is.
    """
    if problems:
        raise CommandFailed("\n  ".join(["The command cannot be understood.", *problems]), exit_code=Exit.USAGE)


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
        ("balancing", enum_word(route, "balancing").replace("_", " ")),
        ("fallbacks", ", ".join(name.removeprefix("routes/") for name in route.fallbacks)),
        ("deadline", f"{route.deadline.ToMilliseconds() / 1000:g} s" if route.HasField("deadline") else ""),
        ("hedge after", f"{route.hedge_delay.ToMilliseconds() / 1000:g} s" if route.HasField("hedge_delay") else ""),
        ("cached", "yes" if route.cached else ""),
        ("overrides", "; ".join(f"{each.mode} {each.request_fields_json}" for each in route.overrides)),
    ]
    return [(name, value) for name, value in facts if value]


def _number(text: str, most: int, where: str, problems: list[str]) -> int:
    # As long a number as this Python may read is not asked for: more digits than these are out of any range.
    value = int(text) if len(text) <= len(str(most)) else most + 1
    if value > most:
        problems.append(f"{where}: the number is too large.")
        return 0
    return value
