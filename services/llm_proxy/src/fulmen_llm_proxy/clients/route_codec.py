"""Routes and backends between their protobuf form, which the store keeps, and the routing table."""

from __future__ import annotations

import re

from google.protobuf.message import DecodeError

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen_llm_proxy.domain.apis.api import ApiName, Dialect
from fulmen_llm_proxy.domain.apis.overrides import parse_overrides
from fulmen_llm_proxy.domain.engines import Engine
from fulmen_llm_proxy.domain.routing import ANTHROPIC_APIS, OPENAI_APIS, Backend, Route, Target

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
_MAX_TARGETS = 16
_NS_PER_S = 1e9
_MAX_WEIGHT = 10_000
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


def route_resource(model: str) -> str:
    """Returns the id of the resource that holds a route."""
    return f"{ROUTE_KIND}.{model}"


def backend_resource(backend_id: str) -> str:
    """Returns the id of the resource that holds a backend."""
    return f"{BACKEND_KIND}.{backend_id}"


def model_of(name: str, field: str = "name") -> str:
    """Takes the model out of `routes/{model}`.

    Raises:
        ArgumentInvalid: if the name is malformed.
    """
    return _id_of(name, "routes/", _MODEL, field)


def backend_id_of(name: str, field: str = "name") -> str:
    """Takes the id out of `backends/{id}`.

    Raises:
        ArgumentInvalid: if the name is malformed.
    """
    return _id_of(name, "backends/", _BACKEND_ID, field)


def decode_route(message: route_pb2.Route) -> Route:
    """Checks a route and turns it into the table's form.

    Raises:
        ArgumentInvalid: if a field is malformed or out of range.
    """
    model = model_of(message.name, "route.name")
    if not 1 <= len(message.targets) <= _MAX_TARGETS:
        raise _invalid("route.targets", f"needs 1 to {_MAX_TARGETS} targets")
    targets = tuple(_decode_target(model, i, target) for i, target in enumerate(message.targets))
    if len(targets) > 1 and not any(target.weight for target in targets):
        raise _invalid("route.targets", "at least one target needs a weight")
    overrides = {}
    for i, override in enumerate(message.overrides):
        if override.mode not in MODES:
            raise _invalid(f"route.overrides[{i}].mode", f"is not one of {', '.join(MODES)}")
        overrides[override.mode] = parse_overrides(override.request_fields_json)
    return Route(model=model, targets=targets, overrides=overrides)


def _decode_target(model: str, i: int, target: route_pb2.RouteTarget) -> Target:
    if not 0 <= target.weight <= _MAX_WEIGHT:
        raise _invalid(f"route.targets[{i}].weight", f"must be 0 to {_MAX_WEIGHT}")
    if target.policy_version < 0:
        raise _invalid(f"route.targets[{i}].policy_version", "must not be negative")
    return Target(
        backend_id=backend_id_of(target.backend, f"route.targets[{i}].backend"),
        model=target.backend_model or model,
        policy=target.policy,
        policy_version=target.policy_version,
        weight=target.weight,
    )


def decode_backend(message: backend_pb2.Backend) -> Backend:
    """Checks a backend and turns it into the table's form.

    Raises:
        ArgumentInvalid: if a field is malformed or out of range.
    """
    backend_id = backend_id_of(message.name, "backend.name")
    if not _BASE_URL.fullmatch(message.base_url):
        raise _invalid("backend.base_url", "is not of the form http://host:port/v1")
    azure = message.dialect == backend_pb2.DIALECT_AZURE_OPENAI
    if azure and not message.api_version:
        raise _invalid("backend.api_version", "is needed for DIALECT_AZURE_OPENAI")
    dialect = Dialect.ANTHROPIC if message.dialect == backend_pb2.DIALECT_ANTHROPIC else Dialect.OPENAI
    if message.max_in_flight < 0:
        raise _invalid("backend.max_in_flight", "must not be negative")
    if message.engine not in _ENGINES:
        raise _invalid("backend.engine", "is not an engine that is known here")
    return Backend(
        id=backend_id,
        base_url=message.base_url.rstrip("/"),
        dialect=dialect,
        azure=azure,
        api_version=message.api_version,
        apis=_apis(message, dialect),
        key_name=message.key_name,
        returns_token_ids=message.returns_token_ids,
        max_in_flight=message.max_in_flight or _DEFAULT_MAX_IN_FLIGHT,
        draining=message.draining,
        engine=_ENGINES[message.engine],
        hold_until_s=message.hold_until_time.ToNanoseconds() / _NS_PER_S
        if message.HasField("hold_until_time")
        else 0.0,
    )


def _apis(message: backend_pb2.Backend, dialect: Dialect) -> frozenset[ApiName]:
    if not message.apis:
        return ANTHROPIC_APIS if dialect is Dialect.ANTHROPIC else OPENAI_APIS
    unknown = [number for number in message.apis if number not in _API_NAMES]
    if unknown:
        raise _invalid("backend.apis", f"has unknown values: {unknown}")
    return frozenset(_API_NAMES[number] for number in message.apis)


def parse_route(content: bytes) -> route_pb2.Route:
    """Reads a route from the content of its resource.

    Raises:
        ArgumentInvalid: if it is not a serialised route.
    """
    try:
        return route_pb2.Route.FromString(content)
    except DecodeError:
        raise _invalid("content", "is not a serialised fulmen.llm_proxy.v1.Route") from None


def parse_backend(content: bytes) -> backend_pb2.Backend:
    """Reads a backend from the content of its resource.

    Raises:
        ArgumentInvalid: if it is not a serialised backend.
    """
    try:
        return backend_pb2.Backend.FromString(content)
    except DecodeError:
        raise _invalid("content", "is not a serialised fulmen.llm_proxy.v1.Backend") from None


def _id_of(name: str, prefix: str, pattern: re.Pattern[str], field: str) -> str:
    found = name.removeprefix(prefix)
    if not name.startswith(prefix) or not pattern.fullmatch(found):
        raise _invalid(field, f"{name[:120]!r} is not of the form {prefix}{{{pattern.pattern}}}")
    return found


def _invalid(field: str, description: str) -> ArgumentInvalid:
    return ArgumentInvalid("The request is malformed.", violations=[Violation(field=field, description=description)])
