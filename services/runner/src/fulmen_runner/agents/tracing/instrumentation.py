"""Switches on the instrumentors that are installed: OpenInference's, and OpenTelemetry's of models and agents.

Invariant: an instrumentor that fails is reported and left out; it fails nothing else. None is written here. Needs
nothing but OpenTelemetry's own packages and wrapt, since the Python of a command uses it as well.
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
"""OpenTelemetry's 128 are few: OpenInference writes several for each message of a conversation, and of more than the
limit the first ones go."""

_OPENINFERENCE_GROUP = "openinference_instrumentor"
_OPENTELEMETRY_GROUP = "opentelemetry_instrumentor"

_GENAI = frozenset({
    "agno", "alephalpha", "anthropic", "autogen", "autogen_agentchat", "bedrock", "claude_agent_sdk", "cohere",
    "crewai", "dspy", "google_adk", "google_genai", "google_generativeai", "groq", "haystack", "instructor",
    "langchain", "litellm", "llama_index", "llamaindex", "mcp", "mistralai", "ollama", "openai", "openai_agents",
    "openai_v2", "portkey", "pydantic_ai", "replicate", "smolagents", "strands_agents", "together", "transformers",
    "vertexai", "watsonx",
})  # fmt: skip
"""Which of OpenTelemetry's instrumentors concern models and agents; databases and web servers are not for `auto`."""

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+).*extra\s*==\s*['\"]instruments['\"]")


Report = Callable[[str, str], None]
"""Gets the name of an instrumentor that could not be switched on, and why."""


def instrument(wanted: str, report: Report, *, provider: Callable[[], TracerProvider] | None = None) -> tuple[str, ...]:
    """Chooses instrumentors; each is switched on when its framework is imported, so that others cost nothing.

    Args:
        wanted: `auto`: those of models and agents whose framework is installed, one for each. `none`. Or names of
            instrumentors or of their distributions, separated by commas; these may be of any kind.
            OTEL_SDK_DISABLED and OTEL_PYTHON_DISABLED_INSTRUMENTATIONS are heeded.
        report: Called for each that fails, now or later.
        provider: Makes what they give spans to, when the first is switched on. None: the process's own.

    Returns:
        What was chosen, such as `langchain (openinference-instrumentation-langchain 0.1.80)`.
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
    """Makes a tracer provider for agents: it keeps the attributes of long conversations."""
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    limited = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT" in os.environ or "OTEL_ATTRIBUTE_COUNT_LIMIT" in os.environ
    limits = SpanLimits() if limited else SpanLimits(max_span_attributes=MAX_SPAN_ATTRIBUTES)
    return TracerProvider(shutdown_on_exit=shutdown_on_exit, span_limits=limits)


def genai_instrumentors_are_installed() -> bool:
    """Tells whether `auto` would find anything; costs no import of a framework."""
    return next(_installed(), None) is not None


def _installed() -> Iterator[tuple[str, EntryPoint]]:
    known: set[str] = set()
    # OpenInference's go first: they cover most frameworks, in one vocabulary.
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
            report(name, "No such instrumentor is installed.")
    return chosen


def _framework_is_installed(entry: EntryPoint) -> bool:
    return bool(_frameworks(entry)) or (not _requirements(entry) and find_spec(_normal(entry.name)) is not None)


def _frameworks(entry: EntryPoint) -> list[Distribution]:
    """Returns the installed distributions that an instrumentor says it is for."""
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
        # An editable installation, or a package of a namespace: when it is imported is not known.
        switch_on(None)
    elif not modules:
        report(name, "What it is for is not installed.")


def _is_package(file: PackagePath) -> bool:
    return len(file.parts) == 2 and file.name == "__init__.py"  # A folder and its file.


def _switch_on(entry: EntryPoint, provider: Callable[[], TracerProvider] | None) -> str:
    """Returns why it failed; nothing if it did not."""
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
    except Exception as error:  # noqa: BLE001  # Foreign code against a framework of any version.
        return f"{type(error).__name__}: {error}"
    return ""


def _settle(name: str, instrumentor: object) -> None:
    """Sets what two instrumentors need beside being switched on.

    LangChain calls its tracer where the run is, not in another thread, as it does LangChain's own tracer: only there can
    a span become current (`current_spans`). OpenAI's Agents SDK traces again where a variable had switched that off: the
    instrumentor has taken the place of the exporter to OpenAI, for whose sake it was.
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
