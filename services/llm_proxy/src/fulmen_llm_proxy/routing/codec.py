"""Converts routes and backends between protobuf, as stored, and the routing table; validates them."""

from __future__ import annotations

import re

from google.protobuf.message import DecodeError

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen_llm_proxy.apis.api import ApiName, Dialect, parse_overrides
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.routing.balancing import Balancing
from fulmen_llm_proxy.routing.engines import Engine
from fulmen_llm_proxy.routing.table import ANTHROPIC_APIS, OPENAI_APIS, VLLM_APIS, Backend, Route, Target

ROUTE_KIND = "route"
BACKEND_KIND = "backend"
MODES = ("train", "validation", "test")
CONTENT_TYPE = "application/x-protobuf"

_ENGINES = {
    backend_pb2.ENGINE_UNSPECIFIED: Engine.UNKNOWN,
    backend_pb2.ENGINE_VLLM: Engine.VLLM,
    backend_pb2.ENGINE_SGLANG: Engine.SGLANG,
    backend_pb2.ENGINE_FULMEN: Engine.FULMEN,
}

_DEFAULT_MAX_IN_FLIGHT = 1024
_MAX_PER_MINUTE = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12}
_MAX_TARGETS = 16
_MAX_FALLBACKS = 4
_NS_PER_S = 1e9
_MAX_WEIGHT = 10_000
_MAX_IN_FLIGHT = 1_000_000
_MAX_DEADLINE_S = 86_400.0
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
_MODEL = re.compile(r"[a-z0-9._-]{1,100}")
_BACKEND_ID = re.compile(r"[a-z0-9._-]{1,63}")
_BASE_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
_HEALTH_PATH = re.compile(r"/[^\s#]{0,199}")


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
    return _id_of(name, "routes/", _MODEL, field)


def backend_id_of(name: str, field: str = "name") -> str:
    """Extracts the id from `backends/{id}`.

    Raises:
        ArgumentInvalid: if the name is malformed.
    """
    return _id_of(name, "backends/", _BACKEND_ID, field)


def decode_route(message: route_pb2.Route) -> Route:
    """Validates a route and converts it for the routing table.

    Raises:
        ArgumentInvalid: if fields are malformed or out of range; names all of them.
    """
    problems = _Problems()
    model = problems.id_of(message.name, "routes/", _MODEL, "route.name")
    targets = _decode_targets(model, message, problems)
    route = Route(
        model=model,
        targets=targets,
        overrides=_decode_overrides(message, problems),
        balancing=_decode_balancing(message, problems),
        fallbacks=_decode_fallbacks(model, message, problems),
        deadline_s=problems.seconds(message, "deadline", "route.deadline", _MAX_DEADLINE_S),
        hedge_delay_s=problems.seconds(message, "hedge_delay", "route.hedge_delay", _MAX_DEADLINE_S),
        cached=message.cached,
    )
    if route.cached and any(target.policy for target in targets):
        problems.add("route.cached", "must not be set for a route with a policy: every answer must be sampled")
    problems.settle()
    return route


def _decode_targets(model: str, message: route_pb2.Route, problems: _Problems) -> tuple[Target, ...]:
    if not 1 <= len(message.targets) <= _MAX_TARGETS:
        problems.add("route.targets", f"needs 1 to {_MAX_TARGETS} targets")
    targets = tuple(_decode_target(model, i, target, problems) for i, target in enumerate(message.targets))
    if len(targets) > 1 and not any(target.weight > 0 for target in targets):
        problems.add("route.targets", "at least one target needs a weight")
    return targets


def _decode_target(model: str, i: int, target: route_pb2.RouteTarget, problems: _Problems) -> Target:
    field = f"route.targets[{i}]"
    if not 0 <= target.weight <= _MAX_WEIGHT:
        problems.add(f"{field}.weight", f"must be 0 to {_MAX_WEIGHT}")
    if target.policy_version < 0:
        problems.add(f"{field}.policy_version", "must not be negative")
    return Target(
        backend_id=problems.id_of(target.backend, "backends/", _BACKEND_ID, f"{field}.backend"),
        model=target.backend_model or model,
        policy=target.policy,
        policy_version=target.policy_version,
        weight=target.weight,
    )


def _decode_overrides(message: route_pb2.Route, problems: _Problems) -> dict[str, Fields]:
    overrides: dict[str, Fields] = {}
    for i, override in enumerate(message.overrides):
        if override.mode not in MODES:
            problems.add(f"route.overrides[{i}].mode", f"is not one of {', '.join(MODES)}")
        try:
            overrides[override.mode] = parse_overrides(override.request_fields_json)
        except ArgumentInvalid as error:
            problems.add(f"route.overrides[{i}].request_fields_json", error.message)
    return overrides


def _decode_balancing(message: route_pb2.Route, problems: _Problems) -> Balancing:
    found = _BALANCINGS.get(message.balancing)
    if found is None:
        problems.add("route.balancing", f"has the unknown value {message.balancing}")
    return found or Balancing.STICKY


def _decode_fallbacks(model: str, message: route_pb2.Route, problems: _Problems) -> tuple[str, ...]:
    if len(message.fallbacks) > _MAX_FALLBACKS:
        problems.add("route.fallbacks", f"may name {_MAX_FALLBACKS} routes at most")
    fallbacks: list[str] = []
    for i, name in enumerate(message.fallbacks):
        field = f"route.fallbacks[{i}]"
        fallback = problems.id_of(name, "routes/", _MODEL, field)
        if fallback and fallback in (model, *fallbacks):
            problems.add(field, "names the route itself, or one twice")
        fallbacks.append(fallback)
    return tuple(fallbacks)


def decode_backend(message: backend_pb2.Backend) -> Backend:
    """Validates a backend and converts it for the routing table.

    Raises:
        ArgumentInvalid: if fields are malformed or out of range; names all of them.
    """
    problems = _Problems()
    azure = message.dialect == backend_pb2.DIALECT_AZURE_OPENAI
    dialect = Dialect.ANTHROPIC if message.dialect == backend_pb2.DIALECT_ANTHROPIC else Dialect.OPENAI
    if message.dialect not in backend_pb2.Dialect.values():
        problems.add("backend.dialect", f"has the unknown value {message.dialect}")
    if not _BASE_URL.fullmatch(message.base_url):
        problems.add("backend.base_url", "is not of the form http://host:port/v1")
    if azure and not message.api_version:
        problems.add("backend.api_version", "is needed for DIALECT_AZURE_OPENAI")
    if message.engine not in _ENGINES:
        problems.add("backend.engine", "is not a known engine")
    if message.health_path and not _HEALTH_PATH.fullmatch(message.health_path):
        problems.add("backend.health_path", "is not of the form /health")
    problems.range(message.max_in_flight, "backend.max_in_flight", _MAX_IN_FLIGHT)
    for limit, maximum in _MAX_PER_MINUTE.items():
        problems.range(getattr(message, limit), f"backend.{limit}", maximum)
    backend = Backend(
        id=problems.id_of(message.name, "backends/", _BACKEND_ID, "backend.name"),
        base_url=message.base_url.rstrip("/"),
        dialect=dialect,
        azure=azure,
        api_version=message.api_version,
        apis=_apis(message, dialect, problems),
        key_name=message.key_name,
        returns_token_ids=message.returns_token_ids,
        max_in_flight=message.max_in_flight or _DEFAULT_MAX_IN_FLIGHT,
        draining=message.draining,
        requests_per_minute=message.requests_per_minute,
        tokens_per_minute=message.tokens_per_minute,
        engine=_ENGINES.get(message.engine, Engine.UNKNOWN),
        health_path=message.health_path,
        hold_until_s=message.hold_until_time.ToNanoseconds() / _NS_PER_S
        if message.HasField("hold_until_time")
        else 0.0,
    )
    problems.settle()
    return backend


def _apis(message: backend_pb2.Backend, dialect: Dialect, problems: _Problems) -> frozenset[ApiName]:
    if not message.apis:
        openai = VLLM_APIS if message.engine == backend_pb2.ENGINE_VLLM else OPENAI_APIS
        return ANTHROPIC_APIS if dialect is Dialect.ANTHROPIC else openai
    unknown = [number for number in message.apis if number not in _API_NAMES]
    if unknown:
        problems.add("backend.apis", f"has unknown values: {unknown}")
    return frozenset(_API_NAMES[number] for number in message.apis if number in _API_NAMES)


class _Problems:
    """Collects the violations of a message, to report all of them at once."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        self._found.append(Violation(field=field, description=description))

    def id_of(self, name: str, prefix: str, pattern: re.Pattern[str], field: str) -> str:
        """Extracts the id from a name; empty if malformed."""
        found = name.removeprefix(prefix)
        if name.startswith(prefix) and pattern.fullmatch(found):
            return found
        self.add(field, f"{name[:120]!r} is not of the form {prefix}{{{pattern.pattern}}}")
        return ""

    def range(self, value: int, field: str, maximum: int) -> None:
        """Checks a number for which 0 means unset."""
        if not 0 <= value <= maximum:
            self.add(field, f"must be 1 to {maximum}, or unset")

    def seconds(self, message: route_pb2.Route, name: str, field: str, max_s: float) -> float | None:
        """Returns a duration in seconds; None if it is unset."""
        if not message.HasField(name):
            return None
        found_s = float(getattr(message, name).ToNanoseconds() / _NS_PER_S)
        if not 0 < found_s <= max_s:
            self.add(field, f"must be over 0 s and at most {max_s:.0f} s")
        return found_s

    def settle(self) -> None:
        """Raises ArgumentInvalid if anything is wrong."""
        if self._found:
            raise ArgumentInvalid("The request is malformed.", violations=self._found)


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
    problems = _Problems()
    found = problems.id_of(name, prefix, pattern, field)
    problems.settle()
    return found


def _invalid(field: str, description: str) -> ArgumentInvalid:
    return ArgumentInvalid("The request is malformed.", violations=[Violation(field=field, description=description)])
