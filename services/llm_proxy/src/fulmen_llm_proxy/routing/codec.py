"""Converts routes and backends between protobuf, as stored, and the routing table; validates them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.kinds import (
    BACKEND_ID,
    MAX_PATTERNS,
    MODEL,
    NO_REDACTION,
    REDACTIONS,
    Problems,
    backend_problems,
    overrides_problem,
    pattern_problem,
    route_problems,
)
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen_llm_proxy.apis.api import UNREADABLE, ApiName, Dialect, decode_fields, wrong
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.routing.balancing import Balancing
from fulmen_llm_proxy.routing.engines import Engine
from fulmen_llm_proxy.routing.table import (
    ANTHROPIC_APIS,
    LITELLM_APIS,
    OPENAI_APIS,
    VLLM_APIS,
    Backend,
    Recording,
    Route,
    Target,
)

ROUTE_KIND = "route"
BACKEND_KIND = "backend"
CONTENT_TYPE = "application/x-protobuf"

_VERSIONED = re.compile(r"[^/:]/v\d+[^/]*$")

_ENGINES = {
    backend_pb2.ENGINE_UNSPECIFIED: Engine.UNKNOWN,
    backend_pb2.ENGINE_VLLM: Engine.VLLM,
    backend_pb2.ENGINE_SGLANG: Engine.SGLANG,
    backend_pb2.ENGINE_FULMEN: Engine.FULMEN,
}

_DEFAULT_MAX_IN_FLIGHT = 1024
_NS_PER_S = 1e9
_DEFAULT_RETENTION_S = 30 * 86_400
_PATTERN_LIMIT_S = 0.01
_BALANCINGS = {
    route_pb2.BALANCING_UNSPECIFIED: Balancing.STICKY,
    route_pb2.BALANCING_STICKY: Balancing.STICKY,
    route_pb2.BALANCING_PREFIX_CACHE: Balancing.PREFIX_CACHE,
    route_pb2.BALANCING_LEAST_OUTSTANDING: Balancing.LEAST_OUTSTANDING,
}
_API_NAMES = {
    backend_pb2.API_CHAT_COMPLETIONS: ApiName.CHAT,
    backend_pb2.API_COMPLETIONS: ApiName.COMPLETIONS,
    backend_pb2.API_RESPONSES: ApiName.RESPONSES,
    backend_pb2.API_EMBEDDINGS: ApiName.EMBEDDINGS,
    backend_pb2.API_MESSAGES: ApiName.MESSAGES,
    backend_pb2.API_COUNT_TOKENS: ApiName.COUNT_TOKENS,
}


def route_resource(model: str) -> str:
    """Returns the id of the resource that holds a route."""
    return f"{ROUTE_KIND}.{model}"


def backend_resource(backend_id: str) -> str:
    """Returns the id of the resource that holds a backend."""
    return f"{BACKEND_KIND}.{backend_id}"


def model_of(name: str, field: str = "name") -> str:
    """Extracts the model from `routes/{model}`.

    Raises:
        ArgumentInvalid: if the name is malformed.
    """
    return _id_of(name, "routes/", MODEL, field)


def backend_id_of(name: str, field: str = "name") -> str:
    """Extracts the id from `backends/{id}`.

    Raises:
        ArgumentInvalid: if the name is malformed.
    """
    return _id_of(name, "backends/", BACKEND_ID, field)


def decode_route(message: route_pb2.Route) -> Route:
    """Validates a route and converts it for the routing table.

    Raises:
        ArgumentInvalid: if fields are malformed or out of range; names all of them.
    """
    _settle([*route_problems(message), *_search_problems(message.recording)])
    model = message.name.removeprefix("routes/")
    return Route(
        model=model,
        targets=tuple(
            Target(
                backend_id=target.backend.removeprefix("backends/"),
                model=target.backend_model or model,
                policy=target.policy,
                policy_version=target.policy_version,
                weight=target.weight,
            )
            for target in message.targets
        ),
        overrides={each.mode: parse_overrides(each.request_fields_json) for each in message.overrides},
        balancing=_BALANCINGS[message.balancing],
        fallbacks=tuple(name.removeprefix("routes/") for name in message.fallbacks),
        deadline_s=_seconds(message, "deadline"),
        hedge_delay_s=_seconds(message, "hedge_delay"),
        cached=message.cached,
        project=message.project,
        recording=_recording(message.recording) if message.HasField("recording") else None,
        rolling_versions=message.rolling_versions,
    )


def _recording(message: route_pb2.Recording) -> Recording:
    rules = tuple(dict.fromkeys(message.redact)) or REDACTIONS
    return Recording(
        sample_rate=message.sample_rate,
        redact=() if rules == (NO_REDACTION,) else rules,
        patterns=tuple((each.name, each.expression) for each in message.patterns),
        retention_s=message.retention.seconds or _DEFAULT_RETENTION_S,
    )


def _search_problems(recording: route_pb2.Recording) -> list[Violation]:
    """Returns the violations of well-formed patterns that cannot be searched for."""
    return [
        Violation(field=f"route.recording.patterns[{i}].expression", description=problem)
        for i, each in enumerate(recording.patterns[:MAX_PATTERNS])
        if not pattern_problem(each.expression) and (problem := _search_problem(each.expression))
    ]


def _search_problem(expression: str) -> str:
    """Returns why a pattern cannot be searched for; empty if it can. `regex` knows a little more than `re`, and less."""
    # As in `recording.redaction`.
    import regex

    try:
        found = regex.compile(expression).match("", timeout=_PATTERN_LIMIT_S)
    except regex.error as error:
        return f"is not a regular expression: {error}"
    except TimeoutError:
        return "takes too long with the empty text"
    return "matches the empty text" if found else ""


def parse_overrides(text: str) -> Fields:
    """Parses the JSON object of a route's overrides.

    Raises:
        ArgumentInvalid: if it is not a JSON object, or names a field that a route may not set.
    """
    if problem := overrides_problem(text):
        raise ArgumentInvalid(f"Sampling overrides {problem}.")
    try:
        return decode_fields(text.encode()) if text else {}
    except UNREADABLE as error:
        raise ArgumentInvalid(f"Sampling overrides must be a JSON object: {wrong(error)}.") from None


def _seconds(message: route_pb2.Route, name: str) -> float | None:
    return getattr(message, name).ToNanoseconds() / _NS_PER_S if message.HasField(name) else None


def decode_backend(message: backend_pb2.Backend) -> Backend:
    """Validates a backend and converts it for the routing table.

    Raises:
        ArgumentInvalid: if fields are malformed or out of range; names all of them.
    """
    _settle(backend_problems(message))
    dialect = Dialect.ANTHROPIC if message.dialect == backend_pb2.DIALECT_ANTHROPIC else Dialect.OPENAI
    return Backend(
        id=message.name.removeprefix("backends/"),
        base_url=_base_url(message.base_url, dialect),
        dialect=dialect,
        azure=message.dialect == backend_pb2.DIALECT_AZURE_OPENAI,
        api_version=message.api_version,
        apis=_apis(message, dialect),
        key_name=message.key_name,
        returns_token_ids=message.returns_token_ids,
        max_in_flight=message.max_in_flight or _DEFAULT_MAX_IN_FLIGHT,
        draining=message.draining,
        requests_per_minute=message.requests_per_minute,
        tokens_per_minute=message.tokens_per_minute,
        engine=_ENGINES[message.engine],
        health_path=message.health_path,
        hold_until_s=message.hold_until_time.ToNanoseconds() / _NS_PER_S,
        stale_version=message.stale_version,
        headers=tuple((name.lower(), value) for name, value in sorted(message.headers.items())),
        drop_params=message.drop_params,
        provider=message.provider,
        region=message.region,
    )


def _base_url(url: str, dialect: Dialect) -> str:
    """Returns the URL with the API's version: Anthropic's clients take their base URL without it, so operators do, too."""
    url = url.rstrip("/")
    return url if dialect is not Dialect.ANTHROPIC or _VERSIONED.search(url) else f"{url}/v1"


def _apis(message: backend_pb2.Backend, dialect: Dialect) -> frozenset[ApiName]:
    if not message.apis:
        if message.provider:
            return LITELLM_APIS
        openai = VLLM_APIS if message.engine == backend_pb2.ENGINE_VLLM else OPENAI_APIS
        return ANTHROPIC_APIS if dialect is Dialect.ANTHROPIC else openai
    return frozenset(_API_NAMES[number] for number in message.apis)


def parse_route(content: bytes) -> route_pb2.Route:
    """Parses a route from the content of its resource.

    Raises:
        ArgumentInvalid: if it is not a serialised route.
    """
    try:
        return route_pb2.Route.FromString(content)
    except DecodeError:
        raise _invalid("content", "is not a serialised fulmen.llm_proxy.v1.Route") from None


def parse_backend(content: bytes) -> backend_pb2.Backend:
    """Parses a backend from the content of its resource.

    Raises:
        ArgumentInvalid: if it is not a serialised backend.
    """
    try:
        return backend_pb2.Backend.FromString(content)
    except DecodeError:
        raise _invalid("content", "is not a serialised fulmen.llm_proxy.v1.Backend") from None


def _id_of(name: str, prefix: str, pattern: re.Pattern[str], field: str) -> str:
    problems = Problems()
    found = problems.id_of(name, prefix, pattern, field)
    _settle(problems.found)
    return found


def _settle(problems: Sequence[Violation]) -> None:
    """Raises ArgumentInvalid if there is a problem."""
    if problems:
        raise ArgumentInvalid("The request is malformed.", violations=problems)


def _invalid(field: str, description: str) -> ArgumentInvalid:
    return ArgumentInvalid("The request is malformed.", violations=[Violation(field=field, description=description)])
