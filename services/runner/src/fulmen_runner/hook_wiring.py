"""Loads the hooks that the settings name; part of the composition root."""

import inspect
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fulmen.errors import SettingsInvalid, Violation
from fulmen_runner.agents.tracing.span_witness import SpanCounts
from fulmen_runner.agents.tracing.spans import AttemptSpans
from fulmen_runner.attempts.hooks import AttemptHooks, NamedHook
from fulmen_runner.settings import RunnerSettings, split

POINTS = ("on_rollout_start", "on_trace_start", "on_trace_end", "on_rollout_end")


class HookMetrics(Collector):
    """Tells how often hooks failed."""

    def __init__(self, hooks: AttemptHooks) -> None:
        self._hooks = hooks

    def collect(self) -> Iterator[Metric]:
        """Yields the figure."""
        failures = CounterMetricFamily(
            "fulmen_runner_hook_failures", "Calls of hooks that raised or took too long.", labels=["hook", "point"]
        )
        for (hook, point), count in list(self._hooks.failure_counts.items()):
            failures.add_metric([hook, point], count)
        yield failures


def make_hooks(settings: RunnerSettings, stack: AsyncExitStack, spans: AttemptSpans) -> AttemptHooks | None:
    """Makes what calls the hooks; None if there are none, so that attempts pay nothing.

    Raises:
        SettingsInvalid: With every hook that cannot be loaded.
    """
    targets = split(settings.hooks)
    if not targets:
        return None
    witness = SpanCounts()
    hooks = AttemptHooks(
        hooks=load_hooks(targets), deadline_s=settings.hook_deadline_s, witness=witness, flush_spans=spans.flush
    )
    spans.add_processor(witness)
    stack.push_async_callback(hooks.close)
    metrics = HookMetrics(hooks)
    REGISTRY.register(metrics)
    stack.callback(REGISTRY.unregister, metrics)
    return hooks


def load_hooks(targets: Sequence[str]) -> tuple[NamedHook, ...]:
    """Loads hooks, `module:name` each, of an instance or of a class that needs no arguments.

    Raises:
        SettingsInvalid: With every hook that cannot be loaded.
    """
    loaded: list[NamedHook] = []
    violations: list[Violation] = []
    for target in targets:
        try:
            loaded.append(NamedHook(name=target, hook=_loaded(target)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # The operator's code may raise anything.
            text = str(error) if isinstance(error, _NoHook) else f"{type(error).__name__}: {error}"
            violations.append(Violation(field="FULMEN_RUNNER_HOOKS", description=f"{target}: {text}"))
    if violations:
        raise SettingsInvalid("Hooks cannot be loaded.", violations=violations)
    return tuple(loaded)


class _NoHook(Exception):
    """What a target names is no hook."""


def _loaded(target: str) -> object:
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise _NoHook("not `module:name`.")
    found = pkgutil.resolve_name(target)
    hook = found() if inspect.isclass(found) else found
    methods = {point: getattr(hook, point, None) for point in POINTS}
    if all(method is None for method in methods.values()):
        raise _NoHook(f"has none of {', '.join(POINTS)}.")
    for point, method in methods.items():
        if method is not None and not inspect.iscoroutinefunction(method):
            raise _NoHook(f"its {point} is no async method.")
    return hook
