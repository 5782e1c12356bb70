"""Kinds of resources that services act on, and what their content must be.

The store checks a version before it stores it, so that readers can read all of them. Readers check again: a stored
version may be older than a rule.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError, Message

from fulmen.errors import Violation
from fulmen.ids import NOT_DOTS
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.secret_names import secrets_problems

__all__ = [
    "BACKEND_ID",
    "CHECKED_KINDS",
    "MAX_PATTERNS",
    "MODEL",
    "MODES",
    "NO_REDACTION",
    "OF_SERVICES",
    "REDACTIONS",
    "Problems",
    "backend_problems",
    "content_problems",
    "id_problems",
    "overrides_problem",
    "pattern_problem",
    "policy_problem",
    "route_problems",
]

MODES: Final = ("train", "validation", "test")
PROJECT: Final = re.compile(r"[a-z0-9-]{1,63}")
MODEL: Final = re.compile(rf"{NOT_DOTS}[a-z0-9._-]{{1,100}}")
BACKEND_ID: Final = re.compile(rf"{NOT_DOTS}[a-z0-9._-]{{1,63}}")

PROTECTED_FIELDS: Final = frozenset(
    {"model", "messages", "input", "prompt", "stream", "stream_options", "return_token_ids", "logprobs"}
)
"""Fields that a route may not override, because they belong to the caller or the capture."""

_BASE_URL: Final = re.compile(r"https?://[^\s/?#\\]+(/[^\s?#\\]*)?")
_HEALTH_PATH: Final = re.compile(r"/[^\s#]{0,199}")
_KEY_NAME: Final = re.compile(r"[A-Za-z0-9._-]{0,64}")
_PROVIDER: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_REGION: Final = re.compile(r"[a-z0-9-]{0,40}")
_THROUGH_LITELLM: Final = frozenset({backend_pb2.API_CHAT_COMPLETIONS, backend_pb2.API_EMBEDDINGS})
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_MAX_HEADERS: Final = 16
_MAX_HEADER_BYTES: Final = 1024
_OWN_HEADERS: Final = frozenset(
    [
        "accept-encoding",
        "api-key",
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "cookie",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "te",
        "traceparent",
        "tracestate",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-api-key",
    ]
)
"""Headers that the proxy sets itself, or that belong to one connection."""
_MAX_TARGETS: Final = 64
_MAX_FALLBACKS: Final = 4
_MAX_WEIGHT: Final = 10_000
_MAX_VERSION: Final = 10**18
_MAX_DEADLINE_S: Final = 86_400
_MAX_IN_FLIGHT: Final = 1_000_000
_MAX_PER_MINUTE: Final = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12}
_MAX_TIME_S: Final = 253_402_300_799
"""Last second of the year 9999, the end of google.protobuf.Timestamp."""

REDACTIONS: Final = ("email", "phone", "card_number", "api_key")
"""Built-in rules of redaction."""
NO_REDACTION: Final = "none"
MIN_RETENTION_S: Final = 3600
MAX_RETENTION_S: Final = 10 * 366 * 86_400
MAX_PATTERNS: Final = 16
_MAX_EXPRESSION: Final = 256
_PATTERN_NAME: Final = re.compile(r"[a-z0-9_]{1,32}")

_NS_PER_S: Final = 10**9
_MAX_ARGUMENTS: Final = 256
_MAX_BYTES: Final = 2**50
_MAX_CPUS: Final = 10_000
_MAX_PROCESSES: Final = 2**20


class Problems:
    """Collects the violations of a message, to report all of them together."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        """Adds a violation."""
        self.found.append(Violation(field=field, description=description))

    def id_of(self, name: str, prefix: str, pattern: re.Pattern[str], field: str) -> str:
        """Extracts the id from a name; empty if malformed."""
        found = name.removeprefix(prefix)
        if name.startswith(prefix) and pattern.fullmatch(found):
            return found
        self.add(
            field,
            f"{name[:120]!r} is not of the form {prefix}{{{pattern.pattern.removeprefix(NOT_DOTS)}}}, not of dots alone",
        )
        return ""

    def range(self, value: float, field: str, maximum: float) -> None:
        """Checks a number for which 0 means unset."""
        if not 0 <= value <= maximum:
            self.add(field, f"must be 1 to {maximum}, or unset")

    def duration(self, message: Message, name: str, field: str) -> None:
        """Checks a duration that may be unset."""
        if not message.HasField(name):
            return
        value = getattr(message, name)
        total_s = value.seconds + value.nanos / _NS_PER_S
        if not 0 < total_s <= _MAX_DEADLINE_S or abs(value.nanos) >= _NS_PER_S:
            self.add(field, f"must be greater than 0 s and at most {_MAX_DEADLINE_S} s")


def route_problems(message: route_pb2.Route) -> list[Violation]:
    """Returns the violations of a route."""
    problems = Problems()
    model = problems.id_of(message.name, "routes/", MODEL, "route.name")
    if message.project:
        problems.id_of(message.project, "projects/", PROJECT, "route.project")
    _target_problems(message, problems)
    for i, override in enumerate(message.overrides):
        if override.mode not in MODES:
            problems.add(f"route.overrides[{i}].mode", f"is not one of {', '.join(MODES)}")
        if problem := overrides_problem(override.request_fields_json):
            problems.add(f"route.overrides[{i}].request_fields_json", problem)
    if message.balancing not in route_pb2.Balancing.values():
        problems.add("route.balancing", f"has the unknown value {message.balancing}")
    _fallback_problems(message, model, problems)
    problems.duration(message, "deadline", "route.deadline")
    problems.duration(message, "hedge_delay", "route.hedge_delay")
    if message.HasField("recording"):
        _recording_problems(message.recording, problems)
    if message.cached and any(target.policy for target in message.targets):
        problems.add("route.cached", "must not be set for a route with a policy: every answer must be sampled")
    return problems.found


def _recording_problems(message: route_pb2.Recording, problems: Problems) -> None:
    if not 0 < message.sample_rate <= 1:
        problems.add("route.recording.sample_rate", "must be greater than 0 and at most 1")
    for i, rule in enumerate(message.redact):
        if rule not in REDACTIONS and rule != NO_REDACTION:
            problems.add(f"route.recording.redact[{i}]", f"is not one of {', '.join((*REDACTIONS, NO_REDACTION))}")
    if NO_REDACTION in message.redact and len(message.redact) > 1:
        problems.add("route.recording.redact", f"has {NO_REDACTION} and others")
    if len(message.redact) > len(REDACTIONS) or len(message.patterns) > MAX_PATTERNS:
        problems.add(
            "route.recording", f"may have at most {len(REDACTIONS)} built-in rules and {MAX_PATTERNS} patterns"
        )
    for i, pattern in enumerate(message.patterns[:MAX_PATTERNS]):
        if not _PATTERN_NAME.fullmatch(pattern.name):
            problems.add(f"route.recording.patterns[{i}].name", f"is not of the form {_PATTERN_NAME.pattern}")
        if problem := pattern_problem(pattern.expression):
            problems.add(f"route.recording.patterns[{i}].expression", problem)
    if message.HasField("retention"):
        held = message.retention
        if not MIN_RETENTION_S <= held.seconds <= MAX_RETENTION_S or held.nanos:
            text = f"must be {MIN_RETENTION_S} to {MAX_RETENTION_S} whole seconds, or unset"
            problems.add("route.recording.retention", text)


def pattern_problem(expression: str) -> str:
    """Returns why a text is not a pattern of redaction; empty if it is.

    It is only compiled: a search, even in an empty text, may take forever; only the proxy searches, because it can
    interrupt it.
    """
    if not 1 <= len(expression) <= _MAX_EXPRESSION:
        return f"must have 1 to {_MAX_EXPRESSION} characters"
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    return ""


def overrides_problem(text: str) -> str:
    """Returns why a text is not the overrides of a route; empty if it is valid; the empty text is."""
    try:
        fields = json.loads(text, parse_constant=_no_constant) if text else {}
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return "must be a JSON object"
    protected = sorted(PROTECTED_FIELDS & fields.keys())
    return f"may not set {', '.join(protected)}" if protected else ""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _target_problems(message: route_pb2.Route, problems: Problems) -> None:
    if not 1 <= len(message.targets) <= _MAX_TARGETS:
        problems.add("route.targets", f"needs 1 to {_MAX_TARGETS} targets")
    if len(message.targets) > 1 and not any(target.weight > 0 for target in message.targets):
        problems.add("route.targets", "at least one target needs a weight")
    for i, target in enumerate(message.targets):
        field = f"route.targets[{i}]"
        problems.id_of(target.backend, "backends/", BACKEND_ID, f"{field}.backend")
        if not 0 <= target.weight <= _MAX_WEIGHT:
            problems.add(f"{field}.weight", f"must be 0 to {_MAX_WEIGHT}")
        if not 0 <= target.policy_version <= _MAX_VERSION:
            problems.add(f"{field}.policy_version", "must not be negative")


def _fallback_problems(message: route_pb2.Route, model: str, problems: Problems) -> None:
    if len(message.fallbacks) > _MAX_FALLBACKS:
        problems.add("route.fallbacks", f"may name at most {_MAX_FALLBACKS} routes")
    named = {model}
    for i, name in enumerate(message.fallbacks):
        fallback = problems.id_of(name, "routes/", MODEL, f"route.fallbacks[{i}]")
        if fallback and fallback in named:
            problems.add(f"route.fallbacks[{i}]", "names the route itself, or one twice")
        named.add(fallback)


def backend_problems(message: backend_pb2.Backend) -> list[Violation]:
    """Returns the violations of a backend."""
    problems = Problems()
    problems.id_of(message.name, "backends/", BACKEND_ID, "backend.name")
    if message.project:
        problems.id_of(message.project, "projects/", PROJECT, "backend.project")
    if message.dialect not in backend_pb2.Dialect.values():
        problems.add("backend.dialect", f"has the unknown value {message.dialect}")
    if not _BASE_URL.fullmatch(message.base_url) or not _is_address(message.base_url):
        problems.add("backend.base_url", "is not of the form http://host:port/v1, without credentials")
    if message.dialect == backend_pb2.DIALECT_AZURE_OPENAI and not message.api_version:
        problems.add("backend.api_version", "is required for DIALECT_AZURE_OPENAI")
    if message.engine not in backend_pb2.Engine.values():
        problems.add("backend.engine", "is not a known engine")
    if message.health_path and not _HEALTH_PATH.fullmatch(message.health_path):
        problems.add("backend.health_path", "is not of the form /health")
    _header_problems(message, problems)
    _litellm_problems(message, problems)
    if not _KEY_NAME.fullmatch(message.key_name):
        problems.add("backend.key_name", f"is not of the form {_KEY_NAME.pattern}")
    unknown = [number for number in message.apis if number not in backend_pb2.Api.values() or not number]
    if unknown:
        problems.add("backend.apis", f"has unknown values: {unknown[:_MAX_TARGETS]}")
    problems.range(message.max_in_flight, "backend.max_in_flight", _MAX_IN_FLIGHT)
    for limit, maximum in _MAX_PER_MINUTE.items():
        problems.range(getattr(message, limit), f"backend.{limit}", maximum)
    hold = message.hold_until_time
    if not 0 <= hold.seconds <= _MAX_TIME_S or not 0 <= hold.nanos < _NS_PER_S:
        problems.add("backend.hold_until_time", "is not a time of the years 1970 to 9999")
    return problems.found


def _litellm_problems(message: backend_pb2.Backend, problems: Problems) -> None:
    if message.dialect != backend_pb2.DIALECT_LITELLM:
        for field in ("provider", "region"):
            if getattr(message, field):
                problems.add(f"backend.{field}", "is for DIALECT_LITELLM only")
        return
    if not _PROVIDER.fullmatch(message.provider):
        problems.add("backend.provider", "names no vendor of LiteLLM, such as gemini, bedrock, vertex_ai or cohere")
    if not _REGION.fullmatch(message.region):
        problems.add("backend.region", f"is not of the form {_REGION.pattern}")
    if not _THROUGH_LITELLM.issuperset(message.apis):
        problems.add("backend.apis", "names an API other than CHAT_COMPLETIONS and EMBEDDINGS of DIALECT_LITELLM")
    for field, text in (
        ("returns_token_ids", "is not possible for DIALECT_LITELLM: its answers have no token ids"),
        ("engine", "is not possible for DIALECT_LITELLM: it is a vendor's API"),
        ("health_path", "is not possible for DIALECT_LITELLM: its health is its process's health"),
        ("api_version", "is not possible for DIALECT_LITELLM: it is part of base_url"),
    ):
        if getattr(message, field):
            problems.add(f"backend.{field}", text)


def policy_problem(backend: backend_pb2.Backend) -> str:
    """Returns why a target at a backend cannot serve a policy; empty if it can."""
    if backend.dialect != backend_pb2.DIALECT_LITELLM:
        return ""
    return "cannot be served there: the backend is called through LiteLLM, whose answers have no token ids to train on"


def _header_problems(message: backend_pb2.Backend, problems: Problems) -> None:
    if len(message.headers) > _MAX_HEADERS:
        problems.add("backend.headers", f"has more than {_MAX_HEADERS} entries")
    names = [name.lower() for name in message.headers]
    if len(set(names)) < len(names):
        problems.add("backend.headers", "names a header twice")
    for name, value in sorted(message.headers.items()):
        if not _HEADER_NAME.fullmatch(name):
            problems.add("backend.headers", f"has the malformed name {name[:64]!r}")
        elif name.lower() in _OWN_HEADERS:
            problems.add(f"backend.headers[{name}]", "is set by the proxy itself")
        elif not (value.isascii() and value.isprintable() and len(value) <= _MAX_HEADER_BYTES):
            problems.add(
                f"backend.headers[{name}]", f"is not at most {_MAX_HEADER_BYTES} characters of printable ASCII"
            )


def _is_address(url: str) -> bool:
    """Returns True if a URL has a host and port that a client can connect to, and no credentials."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")  # as resolvers do: no label is empty or too long
        return bool(host) and parts.port != 0 and "@" not in parts.netloc and url.isascii()
    except ValueError:
        return False


def _agent_problems(message: agent_spec_pb2.AgentSpec) -> list[Violation]:
    problems = Problems()
    if message.WhichOneof("entry") is None:
        problems.add("entry", "is not set: it defines how the agent is started")
    problems.range(message.limits.memory_bytes, "limits.memory_bytes", _MAX_BYTES)
    problems.range(message.limits.cpu_count, "limits.cpu_count", _MAX_CPUS)
    problems.range(message.limits.process_count, "limits.process_count", _MAX_PROCESSES)
    for entry in (message.command, message.container, message.grader.command):
        if len(entry.argv) > _MAX_ARGUMENTS:
            problems.add("argv", f"has more than {_MAX_ARGUMENTS} words")
    for problem in secrets_problems(tuple(message.secrets), tuple(message.environment)):
        problems.add("secrets", problem)
    return problems.found


def _parsed(message_class: type[Any], check: Callable[[Any], list[Violation]]) -> Callable[[bytes], list[Violation]]:
    def problems(content: bytes) -> list[Violation]:
        try:
            message = message_class.FromString(content)
        except DecodeError:
            text = f"is not a serialized {message_class.DESCRIPTOR.full_name}"
            return [Violation(field="content", description=text)]
        return check(message)

    return problems


def _unless_empty(check: Callable[[bytes], list[Violation]]) -> Callable[[bytes], list[Violation]]:
    """An empty version marks a removed route or backend."""
    return lambda content: check(content) if content else []


def _policy_problems(content: bytes) -> list[Violation]:
    try:
        description = json.loads(content)
    except (ValueError, RecursionError):
        description = None
    if not isinstance(description, dict) or not isinstance(description.get("path"), str):
        return [Violation(field="content", description="is not a JSON object with the `path` of the weights")]
    return []


def _prompt_problems(content: bytes) -> list[Violation]:
    try:
        content.decode()
    except UnicodeDecodeError:
        return [Violation(field="content", description="is not UTF-8")]
    return []


_CHECKS: Final[Mapping[str, Callable[[bytes], list[Violation]]]] = {
    "agent": _parsed(agent_spec_pb2.AgentSpec, _agent_problems),
    "backend": _unless_empty(_parsed(backend_pb2.Backend, backend_problems)),
    "policy": _policy_problems,
    "prompt": _prompt_problems,
    "route": _unless_empty(_parsed(route_pb2.Route, route_problems)),
}


CHECKED_KINDS: Final = tuple(_CHECKS)
"""Kinds whose content is checked."""


OF_SERVICES: Final = ("backend", "policy", "route")
"""Kinds that services act on; each has its own ids, such as `route.tiny`."""


def id_problems(kind: str, resource_id: str) -> list[Violation]:
    """Returns the violation of an id that belongs to another kind, and could never be published as that kind again."""
    prefix, dot, _ = resource_id.partition(".")
    if not dot or prefix == kind or prefix not in OF_SERVICES:
        return []
    return [Violation(field="name", description=f"begins with `{prefix}.`, which is for resources of kind {prefix}")]


def content_problems(kind: str, content: bytes) -> list[Violation]:
    """Returns the violations of a resource's content; empty for a kind that no service acts on."""
    check = _CHECKS.get(kind)
    return [] if check is None else check(content)
