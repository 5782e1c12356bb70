"""Enables installed instrumentors: OpenInference's, and OpenTelemetry's for models and agents.

Invariant: a failing instrumentor is reported and skipped. Depends on OpenTelemetry and wrapt alone, since it is also
loaded in Python commands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, PackagePath, distribution, entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

AUTO = "auto"
NONE = "none"

MAX_SPAN_ATTRIBUTES = 4096
"""OpenTelemetry's default of 128 is too low: OpenInference writes several per message, and the oldest are dropped."""

_OPENINFERENCE_GROUP = "openinference_instrumentor"
_OPENTELEMETRY_GROUP = "opentelemetry_instrumentor"

_GENAI = frozenset({
    "agno", "alephalpha", "anthropic", "autogen", "autogen_agentchat", "bedrock", "claude_agent_sdk", "cohere",
    "crewai", "dspy", "google_adk", "google_genai", "google_generativeai", "groq", "haystack", "instructor",
    "langchain", "litellm", "llama_index", "llamaindex", "mcp", "mistralai", "ollama", "openai", "openai_agents",
    "openai_v2", "portkey", "pydantic_ai", "replicate", "smolagents", "strands_agents", "together", "transformers",
    "vertexai", "watsonx",
})  # fmt: skip
"""OpenTelemetry's instrumentors for models and agents; `auto` excludes databases and web servers."""

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+).*extra\s*==\s*['\"]instruments['\"]")


Report = Callable[[str, str], None]
"""Called with the name of an instrumentor that failed, and the reason."""


def instrument(wanted: str, report: Report, *, provider: Callable[[], TracerProvider] | None = None) -> tuple[str, ...]:
    """Registers instrumentors; each is enabled when its framework is imported.

    Args:
        wanted: `auto` for those of installed model and agent frameworks, one each; `none`; or comma-separated names of
            instrumentors or their distributions, of any kind. OTEL_SDK_DISABLED and
            OTEL_PYTHON_DISABLED_INSTRUMENTATIONS are respected.
        report: Called for each failure, now or later.
        provider: Returns the tracer provider, called when the first is enabled; None for the global one.

    Returns:
        The registered ones, such as `langchain (openinference-instrumentation-langchain 0.1.80)`.
    """
    if wanted == NONE or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    disabled = {_normal(name) for name in os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
    chosen = dict(_installed()) if wanted == AUTO else _named(wanted, report)
    chosen = {name: entry for name, entry in chosen.items() if not {name, _normal(entry.name)} & disabled}
    for name, entry in chosen.items():
        _switch_on_with_framework(name, entry, report, provider)
    return tuple(f"{name} ({_distribution_of(entry)})" for name, entry in sorted(chosen.items()))


def new_provider(*, shutdown_on_exit: bool) -> TracerProvider:
    """Returns a tracer provider for agents, with a limit of attributes for long conversations."""
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    limited = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT" in os.environ or "OTEL_ATTRIBUTE_COUNT_LIMIT" in os.environ
    limits = SpanLimits() if limited else SpanLimits(max_span_attributes=MAX_SPAN_ATTRIBUTES)
    return TracerProvider(shutdown_on_exit=shutdown_on_exit, span_limits=limits)


def genai_instrumentors_are_installed() -> bool:
    """Returns True if `auto` would find any, without importing a framework."""
    return next(_installed(), None) is not None


def _installed() -> Iterator[tuple[str, EntryPoint]]:
    known: set[str] = set()
    # OpenInference first: it covers most frameworks with one schema.
    for group in (_OPENINFERENCE_GROUP, _OPENTELEMETRY_GROUP):
        for entry in entry_points(group=group):
            name = _normal(entry.name).removesuffix("_v2")
            concerned = group == _OPENINFERENCE_GROUP or _normal(entry.name) in _GENAI
            if concerned and name not in known and _framework_is_installed(entry):
                known.add(name)
                yield name, entry


def _named(wanted: str, report: Report) -> dict[str, EntryPoint]:
    entries = [*entry_points(group=_OPENINFERENCE_GROUP), *entry_points(group=_OPENTELEMETRY_GROUP)]
    chosen: dict[str, EntryPoint] = {}
    for name in (_normal(part) for part in wanted.split(",") if part.strip()):
        found = [entry for entry in entries if name in (_normal(entry.name), _distribution_name(entry))]
        if found:
            chosen[name] = found[0]
        else:
            report(name, "not installed")
    return chosen


def _framework_is_installed(entry: EntryPoint) -> bool:
    return bool(_frameworks(entry)) or (not _requirements(entry) and find_spec(_normal(entry.name)) is not None)


def _frameworks(entry: EntryPoint) -> list[Distribution]:
    """Returns the installed distributions that an instrumentor declares as its target."""
    found = []
    for name in _requirements(entry):
        with suppress(PackageNotFoundError):
            found.append(distribution(name))
    return found


def _requirements(entry: EntryPoint) -> list[str]:
    requirements = (entry.dist.requires or []) if entry.dist is not None else []
    return [match[1] for match in map(_REQUIREMENT.match, requirements) if match is not None]


def _switch_on_with_framework(
    name: str, entry: EntryPoint, report: Report, provider: Callable[[], TracerProvider] | None
) -> None:
    modules = {file.parts[0] for framework in _frameworks(entry) for file in framework.files or () if _is_package(file)}
    if not modules and find_spec(_normal(entry.name)) is not None:
        modules = {_normal(entry.name)}
    begun: list[str] = []

    def switch_on(_: ModuleType | None) -> None:
        if not begun:
            begun.append(name)
            failure = _switch_on(entry, provider)
            if failure:
                report(name, failure)

    for module in modules:
        wrapt.register_post_import_hook(switch_on, module)
    if not modules and _frameworks(entry):
        # An editable installation or namespace package: its import cannot be detected.
        switch_on(None)
    elif not modules:
        report(name, "its framework is not installed")


def _is_package(file: PackagePath) -> bool:
    return len(file.parts) == 2 and file.name == "__init__.py"  # A folder and its file.


def _switch_on(entry: EntryPoint, provider: Callable[[], TracerProvider] | None) -> str:
    """Enables an instrumentor; returns the error, empty on success."""
    try:
        instrumentor = entry.load()()
        if instrumentor.is_instrumented_by_opentelemetry:
            return ""
        conflict = instrumentor._check_dependency_conflicts()
        if conflict:
            return str(conflict)
        given = {} if provider is None else {"tracer_provider": provider()}
        instrumentor.instrument(skip_dep_check=True, **given)
        _settle(_normal(entry.name), instrumentor)
    except Exception as error:  # noqa: BLE001  # Third-party code against a framework of any version.
        return f"{type(error).__name__}: {error}"
    return ""


def _settle(name: str, instrumentor: object) -> None:
    """Applies the settings that two instrumentors need.

    LangChain must call its tracer inline rather than in another thread, so that a span can become current
    (`current_spans`). OpenAI's Agents SDK must trace even if a variable has disabled it: the instrumentor replaces the
    exporter to OpenAI, which was the reason to disable it.
    """
    tracer: Any = getattr(instrumentor, "_tracer", None)
    if tracer is not None and hasattr(tracer, "run_inline"):
        tracer.run_inline = True
    if name == "openai_agents":
        import_module("agents").set_tracing_disabled(disabled=False)


def _distribution_of(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _distribution_name(entry: EntryPoint) -> str:
    return _normal(entry.dist.name) if entry.dist is not None else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name.strip().lower())
