"""Loads the hooks named in the settings, and calls them around attempts.

Invariant: hooks do not change an attempt's outcome, except that FailAttempt turns a success into a failure. A hook that
raises or exceeds its timeout is reported and abandoned.
"""

import asyncio
import inspect
import pkgutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from fulmen.errors import SettingsInvalid, Violation
from fulmen.hooks import STOPPED, AttemptEnd, AttemptFacts, FailAttempt, RewardFact, SpansSummary
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Succeeded, cut_at_front

CLOSE_TIMEOUT_S = 5.0
MAX_ERROR_CHARS = 500

TIMED_OUT = "timed out"
POINTS = ("on_rollout_start", "on_trace_start", "on_trace_end", "on_rollout_end")

Method = Callable[..., Awaitable[None]]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedHook:
    """A hook and the target it was loaded from."""

    name: str
    hook: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HookFailure:
    """A failed call of a hook.

    Attributes:
        hook: Name of the hook.
        point: Name of the method.
        error: Type and text of the exception, or `TIMED_OUT`.
    """

    hook: str
    point: str
    error: str


def load_hooks(targets: Sequence[str]) -> tuple[NamedHook, ...]:
    """Loads hooks from `module:name` targets, each an instance or a class without constructor arguments.

    Raises:
        SettingsInvalid: If a hook cannot be loaded; lists all of them.
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
        raise SettingsInvalid("hooks cannot be loaded", violations=violations)
    return tuple(loaded)


class _NoHook(Exception):
    """The target is not a hook."""


def _loaded(target: str) -> object:
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise _NoHook("must have the form `module:name`")
    found = pkgutil.resolve_name(target)
    hook = found() if inspect.isclass(found) else found
    methods = {point: getattr(hook, point, None) for point in POINTS}
    if all(method is None for method in methods.values()):
        raise _NoHook(f"has none of the methods {', '.join(POINTS)}")
    for point, method in methods.items():
        if method is not None and not inspect.iscoroutinefunction(method):
            raise _NoHook(f"{point} is not an async method")
    return hook


class SpanCounter(Protocol):
    """Counts spans by attempt and records hook failures in the trace; implemented with OpenTelemetry by `SpanCounts`."""

    def begin(self, attempt: str) -> None:
        """Starts counting the spans of an attempt."""

    def finish(self, attempt: str) -> tuple[dict[str, int], int]:
        """Stops counting; returns the number of spans by name, and of those with an error."""

    def report(self, attempt: str, failure: HookFailure) -> None:
        """Adds a failed hook to the attempt's trace."""


@dataclass(slots=True, kw_only=True)
class HookedAttempt:
    """One attempt with its hooks.

    Attributes:
        failed: Message of FailAttempt; empty if no hook raised it.
        spans: Summary of the recorded spans; None until the agent has ended.
    """

    hooks: "AttemptHooks"
    facts: AttemptFacts
    failed: str = ""
    spans: SpansSummary | None = None
    _reported: int = 0

    async def trace_start(self) -> Failed | None:
        """Calls `on_trace_start`; returns a failure if a hook failed the attempt."""
        await self.call("on_trace_start", self.hooks.hooks, self.facts)
        return self.failure()

    async def trace_end(self, evidence: CaptureEvidence | None, undelivered_count: int) -> None:
        """Calls `on_trace_end`."""
        span_counts, error_count = self.hooks.spans.finish(self.facts.attempt)
        evidence = evidence or CaptureEvidence()
        self.spans = SpansSummary(
            span_counts=span_counts,
            error_count=error_count,
            undelivered_count=undelivered_count,
            model_call_count=evidence.call_count,
            prompt_token_count=evidence.prompt_token_count,
            completion_token_count=evidence.completion_token_count,
        )
        await self.call("on_trace_end", self.hooks.hooks[::-1], self.facts, self.spans)

    async def end(self, outcome: Outcome, duration_s: float) -> Outcome:
        """Calls `on_rollout_end`; returns the outcome to report. Each hook sees the outcome that its predecessors left."""
        outcome = self._decided(outcome)
        for named in self.hooks.hooks[::-1]:
            await self.call("on_rollout_end", (named,), self.facts, self._end_of(outcome, duration_s))
            outcome = self._decided(outcome)
        if self._reported:
            await self.hooks.flush_spans(self.facts.attempt)
        return outcome

    async def stopped(self, duration_s: float) -> None:
        """Calls `on_rollout_end` for an attempt that was stopped without an outcome."""
        self.hooks.spans.finish(self.facts.attempt)
        message = "attempt was stopped"
        end = AttemptEnd(failure_kind=STOPPED, message=message, rewards=(), spans=None, duration_s=duration_s)
        await self.call("on_rollout_end", self.hooks.hooks[::-1], self.facts, end)

    async def call(self, point: str, hooks: Sequence[NamedHook], *arguments: object) -> None:
        """Calls a method of each hook that has it, in order."""
        for named in hooks:
            method = getattr(named.hook, point, None)
            if method is None:
                continue
            error = await self._call_one(named, point, method, arguments)
            if error:
                self._reported += 1
                self.hooks.report(self.facts.attempt, HookFailure(hook=named.name, point=point, error=error))

    def failure(self) -> Failed | None:
        """Returns the failure requested by a hook, if any."""
        return Failed(kind=FailureKind.AGENT_ERROR, message=self.failed) if self.failed else None

    async def _call_one(self, named: NamedHook, point: str, method: Method, arguments: tuple[object, ...]) -> str:
        """Calls a hook's method; returns the error, empty on success."""

        async def invoke() -> None:
            # Called inside the task so that a TypeError for wrong parameters counts as the hook's failure.
            await method(*arguments)

        task = asyncio.create_task(invoke(), name=f"{named.name} {point}")
        try:
            await asyncio.wait((task,), timeout=self.hooks.timeout_s)
        finally:
            if not task.done():
                self.hooks.abandon(task)
        if not task.done():
            return TIMED_OUT
        if task.cancelled():
            return "cancelled itself"
        error = task.exception()
        if isinstance(error, FailAttempt):
            self.failed = self.failed or cut_at_front(str(error) or f"hook {named.name} failed the attempt")
            return ""
        return "" if error is None else f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]

    def _decided(self, outcome: Outcome) -> Outcome:
        if self.failed and isinstance(outcome, Succeeded):
            return Failed(kind=FailureKind.AGENT_ERROR, message=self.failed, output=outcome.output)
        return outcome

    def _end_of(self, outcome: Outcome, duration_s: float) -> AttemptEnd:
        match outcome:
            case Succeeded():
                kind = message = ""
                rewards = tuple(
                    RewardFact(value=r.value, dimension=r.dimension, step=r.step, span_id=r.span_id)
                    for r in outcome.rewards
                )
            case Failed():
                kind, message, rewards = outcome.kind.value, outcome.message, ()
        return AttemptEnd(failure_kind=kind, message=message, rewards=rewards, spans=self.spans, duration_s=duration_s)


@dataclass(slots=True, kw_only=True)
class AttemptHooks:
    """The hooks of a runner.

    Attributes:
        hooks: Called in this order at the start, in reverse order at the end.
        timeout_s: Timeout of one call, in seconds.
        spans: Counts the attempts' spans.
        flush_spans: Flushes an attempt's spans.
        failure_counts: Number of failed calls, by hook and point.
    """

    hooks: Sequence[NamedHook]
    timeout_s: float
    spans: SpanCounter
    flush_spans: Callable[[str], Awaitable[int]]
    failure_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _pending: set["asyncio.Task[Any]"] = field(default_factory=set)

    async def around(self, assignment: Assignment, run: Callable[[HookedAttempt], Awaitable[Outcome]]) -> Outcome:
        """Runs an attempt with its hooks; returns the outcome to report."""
        started_s = time.monotonic()
        attempt = HookedAttempt(hooks=self, facts=_facts_of(assignment))
        self.spans.begin(assignment.attempt)
        try:
            await attempt.call("on_rollout_start", self.hooks, attempt.facts)
            outcome = attempt.failure() or await run(attempt)
        except BaseException:
            # Cancelled, or a bug in the runner: call the hooks in the background and propagate immediately.
            stopped = attempt.stopped(time.monotonic() - started_s)
            self._keep(asyncio.create_task(stopped, name=f"end hooks of {assignment.attempt}"))
            raise
        if attempt.spans is None:
            self.spans.finish(assignment.attempt)
        return await attempt.end(outcome, time.monotonic() - started_s)

    def report(self, attempt: str, failure: HookFailure) -> None:
        """Reports a failed call: in the log, the metric and the attempt's trace."""
        self.failure_counts[failure.hook, failure.point] += 1
        _log.warning("hook_failed", attempt=attempt, hook=failure.hook, point=failure.point, error=failure.error)
        self.spans.report(attempt, failure)

    def abandon(self, task: "asyncio.Task[Any]") -> None:
        """Cancels a call without waiting for it."""
        task.cancel()
        self._keep(task)

    async def close(self) -> None:
        """Waits for pending calls, then closes the hooks."""
        if self._pending:
            await asyncio.wait(set(self._pending), timeout=CLOSE_TIMEOUT_S)
        for named in self.hooks[::-1]:
            closing = getattr(named.hook, "close", None)
            if closing is None:
                continue
            task = asyncio.create_task(closing(), name=f"close {named.name}")
            await asyncio.wait((task,), timeout=CLOSE_TIMEOUT_S)
            if not task.done():
                self.abandon(task)
            elif task.cancelled() or task.exception() is not None:
                _log.warning("hook_failed", hook=named.name, point="close")

    def _keep(self, task: "asyncio.Task[Any]") -> None:
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


def _facts_of(assignment: Assignment) -> AttemptFacts:
    return AttemptFacts(
        rollout=assignment.rollout,
        attempt=assignment.attempt,
        attempt_number=assignment.number,
        project=assignment.project,
        mode=assignment.mode.value,
        agent=assignment.agent,
        input=assignment.input,
        input_content_type=assignment.input_content_type,
        timeout_s=assignment.timeout_s,
        resource_versions=dict(assignment.resource_versions),
    )
