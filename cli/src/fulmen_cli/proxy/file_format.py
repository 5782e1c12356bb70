"""The format of `proxy.toml`: the backends and routes of the LLM proxy.

Reading is strict: an unknown key is a problem with the nearest known key, and all problems of a file are found in one pass.
The tables below are the whole format; `docs/proxy-toml.md` and its JSON Schema are made of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from fulmen.errors import Violation
from fulmen.kinds import (
    MODES,
    NO_REDACTION,
    REDACTIONS,
    backend_problems,
    overrides_problem,
    policy_problem,
    route_problems,
)
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen.train_toml.reader import ConfigError, TableReader, hint, parsed_toml

__all__ = ["TABLES", "Key", "Kind", "ProxyFile", "read_proxy_file"]

MAX_SECONDS: Final = 86_400
MAX_DAYS: Final = 3660
_KEYS_OF_VENDORS: Final = ("key", "api_key", "token", "secret")


class Kind(StrEnum):
    """What the value of a key is."""

    TEXT = "text"
    TEXTS = "list of texts"
    WHOLE = "whole number"
    NUMBER = "number"
    FLAG = "true or false"
    TABLE = "table"
    TABLES = "list of tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a table.

    Attributes:
        text: what it is.
        words: the values of a text, or of the texts of a list; empty if any value is allowed. least, most: range of a
        whole number.
    """

    kind: Kind
    text: str
    words: tuple[str, ...] = ()
    needed: bool = False
    least: int = 1
    most: int = 1


TABLES: Final[Mapping[str, Mapping[str, Key]]] = {
    "": {
        "backend": Key(kind=Kind.TABLES, text="The model servers: tables `[[backend]]`."),
        "route": Key(kind=Kind.TABLES, text="The public model names: tables `[[route]]`."),
    },
    "backend": {
        "name": Key(kind=Kind.TEXT, needed=True, text="Its id, 1 to 63 characters of `[a-z0-9._-]`."),
        "base_url": Key(
            kind=Kind.TEXT,
            needed=True,
            text="Base URL of its API, such as `https://api.openai.com/v1`, without credentials.",
        ),
        "dialect": Key(
            kind=Kind.TEXT,
            words=("openai", "anthropic", "azure-openai", "litellm"),
            text="API dialect; `openai` by default. With `litellm` the vendor's own API is called through LiteLLM.",
        ),
        "provider": Key(
            kind=Kind.TEXT, text="LiteLLM's name of the vendor, such as `gemini` or `bedrock`; required for `litellm`."
        ),
        "region": Key(kind=Kind.TEXT, text="Region of that vendor, where `base_url` does not name it."),
        "api_version": Key(
            kind=Kind.TEXT, text="`api-version` of Azure, where it is required, or `anthropic-version`."
        ),
        "apis": Key(
            kind=Kind.TEXTS,
            words=("chat-completions", "completions", "responses", "embeddings", "messages", "count-tokens"),
            text="APIs that it serves natively; calls of other APIs are translated. By default the usual APIs of its dialect.",
        ),
        "key_name": Key(
            kind=Kind.TEXT,
            text="Name of its API key: a secret (`fulmen secret set`), an entry of the proxy's setting, or a vendor. Not the key itself.",
        ),
        "engine": Key(kind=Kind.TEXT, words=("vllm", "sglang"), text="Engine, whose health and load are read."),
        "returns_token_ids": Key(kind=Kind.FLAG, text="Whether it can return token ids and log-probabilities."),
        "health_path": Key(
            kind=Kind.TEXT, text="Path of the health check, such as `/health`; by default the engine's own."
        ),
        "max_in_flight": Key(
            kind=Kind.WHOLE,
            most=10**6,
            text="Concurrent calls of each proxy process; 1024 by default. Further calls wait.",
        ),
        "requests_per_minute": Key(
            kind=Kind.WHOLE, most=10**9, text="Calls per minute over all proxies; without it there is no limit."
        ),
        "tokens_per_minute": Key(
            kind=Kind.WHOLE, most=10**12, text="Tokens per minute over all proxies; without it there is no limit."
        ),
    },
    "route": {
        "model": Key(
            kind=Kind.TEXT, needed=True, text="Model name that callers use, 1 to 100 characters of `[a-z0-9._-]`."
        ),
        "targets": Key(
            kind=Kind.TABLES, needed=True, text="Targets of the calls, 1 to 64: tables `[[route.targets]]`."
        ),
        "balancing": Key(
            kind=Kind.TEXT,
            words=("sticky", "prefix-cache", "least-outstanding"),
            text="How one of several replicas is chosen; `sticky` by default.",
        ),
        "fallbacks": Key(
            kind=Kind.TEXTS, text="Fallbacks: models of this file whose routes answer when no target can, at most 4."
        ),
        "deadline_s": Key(
            kind=Kind.NUMBER, text="Timeout for the answer, or for the first event of a stream, seconds."
        ),
        "hedge_delay_s": Key(
            kind=Kind.NUMBER, text="Time without a byte after which a second replica is tried, seconds."
        ),
        "cached": Key(kind=Kind.FLAG, text="Whether identical requests are answered from a cache."),
        "overrides": Key(kind=Kind.TABLE, text="Fields of requests that the route sets: table `[route.overrides]`."),
        "recording": Key(kind=Kind.TABLE, text="What is recorded of an app's own calls: table `[route.recording]`."),
    },
    "route.targets": {
        "backend": Key(kind=Kind.TEXT, needed=True, text="Name of a backend of this file."),
        "model": Key(kind=Kind.TEXT, text="Model name sent to the backend; by default the public one."),
        "weight": Key(
            kind=Kind.WHOLE, least=0, most=10_000, text="Share of the calls among the targets; 1 by default."
        ),
        "policy": Key(kind=Kind.TEXT, text="Policy that it serves; without one no tokens are captured."),
        "policy_version": Key(
            kind=Kind.WHOLE,
            most=10**18,
            text="Version that a new target serves; `fulmen proxy promote` changes it later.",
        ),
    },
    "route.overrides": {
        mode: Key(
            kind=Kind.TABLE, text=f"Fields of requests of mode {mode}; or JSON in a text, where null removes a field."
        )
        for mode in MODES
    },
    "route.recording": {
        "sample_rate": Key(
            kind=Kind.NUMBER, needed=True, text="Share of the calls that are recorded, greater than 0 and at most 1."
        ),
        "redact": Key(
            kind=Kind.TEXTS,
            words=(*REDACTIONS, NO_REDACTION),
            text="Built-in redaction rules; by default all.",
        ),
        "patterns": Key(
            kind=Kind.TABLE, text="Further rules: a regular expression for each word that replaces its matches."
        ),
        "retention_days": Key(kind=Kind.NUMBER, text="How long calls are kept, days; 30 by default."),
    },
}

_KEY_OF_FIELD: Final = {
    "backend.name": "name",
    "route.name": "model",
    "route.deadline": "deadline_s",
    "route.hedge_delay": "hedge_delay_s",
    "route.recording.retention": "recording.retention_days",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFile:
    """The backends and routes of a `proxy.toml`; `name` is the file's, which identifies what it owns."""

    name: str
    backends: Sequence[backend_pb2.Backend]
    routes: Sequence[route_pb2.Route]


def read_proxy_file(path: Path, content: bytes | None = None) -> ProxyFile:
    """Reads and checks a `proxy.toml`.

    Args:
        path: the file.
        content: its content; None to read it.

    Raises:
        ConfigError: if it is not valid; lists all problems.
    """
    problems: list[str] = []
    file = TableReader(parsed_toml(path, content), "", problems)
    file.known(*TABLES[""])
    backends = [_backend(each) for each in file.tables("backend")]
    routes = [_route(each) for each in file.tables("route")]
    if not (backends or routes or problems):
        problems.append(
            "it has no [[backend]] and no [[route]]; `fulmen proxy apply FILE --delete` deletes what it owned"
        )
    _relations(file, backends, routes)
    if problems:
        raise ConfigError(f"{path} is not valid.", problems)
    return ProxyFile(name=path.name, backends=backends, routes=routes)


def _backend(table: TableReader) -> backend_pb2.Backend:
    for key in _KEYS_OF_VENDORS:
        if key in table:
            table.problem(
                key,
                "a vendor's key must not be in this file: store it (`fulmen secret set`), and name it with key_name",
            )
    given = _values(table, "backend", ignored=_KEYS_OF_VENDORS)
    backend = backend_pb2.Backend(
        name=f"backends/{given['name']}",
        base_url=given["base_url"],
        dialect=backend_pb2.Dialect.Value(_enum("DIALECT", given["dialect"])),
        apis=[backend_pb2.Api.Value(_enum("API", word)) for word in given["apis"]],
        engine=backend_pb2.Engine.Value(_enum("ENGINE", given["engine"])),
    )
    for name in ("provider", "region", "api_version", "key_name", "returns_token_ids", "health_path", "max_in_flight", "requests_per_minute",
                 "tokens_per_minute"):  # fmt: skip
        setattr(backend, name, given[name])
    _report(table, backend_problems(backend), missing=[key for key in ("name", "base_url") if not given[key]])
    return backend


def _route(table: TableReader) -> route_pb2.Route:
    given = _values(table, "route")
    route = route_pb2.Route(
        name=f"routes/{given['model']}",
        targets=[_target(each) for each in table.tables("targets")],
        balancing=route_pb2.Balancing.Value(_enum("BALANCING", given["balancing"])),
        fallbacks=[f"routes/{model}" for model in given["fallbacks"]],
        deadline=_duration(table, "deadline_s", given["deadline_s"], MAX_SECONDS),
        hedge_delay=_duration(table, "hedge_delay_s", given["hedge_delay_s"], MAX_SECONDS),
        cached=given["cached"],
        overrides=_overrides(table.table("overrides")),
    )
    if "recording" in table:
        route.recording.CopyFrom(_recording(table.table("recording")))
    missing = [key for key in ("model", "targets") if not given[key]]
    # Backends that a target names are checked later, when those of the whole file are known.
    found = [each for each in route_problems(route) if not each.field.startswith("route.overrides")]
    _report(table, [each for each in found if not each.field.endswith(".backend")], missing=missing)
    return route


def _target(table: TableReader) -> route_pb2.RouteTarget:
    given = _values(table, "route.targets")
    if given["policy_version"] and not given["policy"]:
        table.problem("policy_version", "needs a policy")
    return route_pb2.RouteTarget(
        backend=f"backends/{given['backend']}",
        backend_model=given["model"],
        weight=given["weight"] if "weight" in table else 1,
        policy=given["policy"],
        policy_version=given["policy_version"],
    )


def _overrides(table: TableReader) -> list[route_pb2.ModeOverride]:
    table.known(*MODES)
    overrides = []
    for mode in MODES:
        fields = table.json(mode)
        if fields is None:
            continue
        text = fields if isinstance(fields, str) else json.dumps(fields)
        if problem := overrides_problem(text):
            table.problem(mode, problem)
        overrides.append(route_pb2.ModeOverride(mode=mode, request_fields_json=text))
    return overrides


def _recording(table: TableReader) -> route_pb2.Recording:
    given = _values(table, "route.recording")
    patterns = [
        route_pb2.RedactionPattern(name=name, expression=expression)
        for name, expression in table.texts("patterns").items()
    ]
    rate = given["sample_rate"] if "sample_rate" in table else 1
    recording = route_pb2.Recording(sample_rate=rate or 0, redact=given["redact"], patterns=patterns)
    if (days := _duration(table, "retention_days", given["retention_days"], MAX_DAYS)) is not None:
        recording.retention.seconds = round(days.ToNanoseconds() / 1e9 * 86_400)
    return recording


def _values(table: TableReader, name: str, *, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the keys of a table, but for inner tables; a missing one is empty."""
    keys = TABLES[name]
    table.known(*keys, *(key for key in ignored if key in table))
    return {key: _value(table, key, described) for key, described in keys.items()}


def _value(table: TableReader, name: str, key: Key) -> Any:
    match key.kind:
        case Kind.TEXT:
            word = table.text(name, required=key.needed)
            if key.words and word and word not in key.words:
                table.problem(name, f"must be one of {', '.join(key.words)}{hint(word, key.words, list_all=False)}")
                return ""
            return word
        case Kind.TEXTS:
            words = table.words(name, f'["{key.words[0] if key.words else "gpt-4.1"}"]')
            unknown = [word for word in words if key.words and word not in key.words]
            for word in unknown:
                table.problem(name, f"{word!r} is not one of {', '.join(key.words)}")
            return [word for word in words if word not in unknown]
        case Kind.WHOLE:
            return table.whole_number(name, least=key.least, most=key.most)
        case Kind.NUMBER:
            found = table.number(name)
            if key.needed and name not in table:
                table.problem(name, "is required: a number")
            return found
        case Kind.FLAG:
            return table.flag(name)
        case Kind.TABLE | Kind.TABLES:
            if key.needed and name not in table:
                table.problem(name, "is required: a list of tables")
            return name in table


def _duration(table: TableReader, key: str, given: float | None, most: int) -> Duration | None:
    """Returns a number of any unit as a duration of as many seconds; None if it is missing or out of range."""
    if given is None:
        return None
    if not 0 < given <= most:
        table.problem(key, f"must be greater than 0 and at most {most}")
        return None
    duration = Duration()
    duration.FromNanoseconds(round(given * 1e9))
    return duration


def _enum(prefix: str, word: str) -> str:
    return f"{prefix}_{(word or 'unspecified').upper().replace('-', '_')}"


def _report(table: TableReader, violations: Sequence[Violation], *, missing: Sequence[str]) -> None:
    """Adds the violations of a message as problems of the keys of its table, except for missing keys, whose problems are
    already known."""
    for each in violations:
        key = _KEY_OF_FIELD.get(each.field, each.field.partition(".")[2])
        if key not in missing:
            table.problem(key, each.description)


def _relations(file: TableReader, backends: Sequence[backend_pb2.Backend], routes: Sequence[route_pb2.Route]) -> None:
    """Adds names that are given twice, or are not in the file."""
    known = [each.name.removeprefix("backends/") for each in backends]
    models = [each.name.removeprefix("routes/") for each in routes]
    for key, names in (("backend", known), ("route", models)):
        for name, count in Counter(filter(None, names)).items():
            if count > 1:
                file.problem(key, f"{name!r} occurs {count} times")
    for number, route in enumerate(routes, start=1):
        for at, target in enumerate(route.targets, start=1):
            name = target.backend.removeprefix("backends/")
            if name and name not in known:
                file.problem(f"route {number}.targets {at}.backend", f"there is no backend {name!r}{hint(name, known)}")
            elif target.policy and (problem := policy_problem(backends[known.index(name)])):
                file.problem(f"route {number}.targets {at}.policy", problem)
        for fallback in route.fallbacks:
            model = fallback.removeprefix("routes/")
            if model not in models:
                file.problem(f"route {number}.fallbacks", f"there is no route {model!r}{hint(model, models)}")
