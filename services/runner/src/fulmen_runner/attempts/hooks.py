"""Calls hooks around attempts.

Invariant: an attempt ends with the outcome that it would have without hooks, except that one that raises FailAttempt
makes a success a failure. A hook that raises, or takes longer than its deadline, is reported and left behind.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from fulmen.hooks import STOPPED, AttemptEnd, AttemptFacts, FailAttempt, RewardFact, SpansSummary
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Succeeded, cut_at_front

CLOSE_DEADLINE_S = 5.0
MAX_ERROR_CHARS = 500

TIMED_OUT = "timed out"

Method = Callable[..., Awaitable[None]]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedHook:
    """A hook, under the name by which it was configured."""

    name: str
    hook: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HookFailure:
    """A hook that did not do what it should.

    Attributes:
        point: The method's name.
        error: The exception's type and text, or `TIMED_OUT`.
    """

    hook: str
    point: str
    error: str


class SpanWitness(Protocol):
    """Counts spans by attempt, and writes failures of hooks among them; the real one knows OpenTelemetry."""

    def begin(self, attempt: str) -> None:
        """Begins to count the spans of an attempt."""

    def counted(self, attempt: str) -> tuple[dict[str, int], int]:
        """Ends to count; returns spans by name, and how many are errors."""

    def report(self, attempt: str, failure: HookFailure) -> None:
        """Writes a failure into the attempt's trace."""


@dataclass(slots=True, kw_only=True)
class HookedAttempt:
    """One attempt with its hooks.

    Attributes:
        failed: What FailAttempt said; empty if no hook raised it.
        spans: What was recorded; None before the agent has ended.
    """

    hooks: "AttemptHooks"
    facts: AttemptFacts
    failed: str = ""
    spans: SpansSummary | None = None
    _reported: int = 0

    async def trace_start(self) -> Failed | None:
        """Calls the hooks; returns a failure if one of them wants it."""
        await self.call("on_trace_start", self.hooks.hooks, self.facts)
        return self.failure()

    async def trace_end(self, evidence: CaptureEvidence | None, undelivered_count: int) -> None:
        """Calls the hooks."""
        span_counts, error_count = self.hooks.witness.counted(self.facts.attempt)
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
        """Calls the hooks, each with what those before it left of the outcome; returns the outcome to report."""
        outcome = self._decided(outcome)
        for named in self.hooks.hooks[::-1]:
            await self.call("on_rollout_end", (named,), self.facts, self._end_of(outcome, duration_s))
            outcome = self._decided(outcome)
        if self._reported:
            await self.hooks.flush_spans(self.facts.attempt)
        return outcome

    async def stopped(self, duration_s: float) -> None:
        """Calls the hooks of an attempt that was stopped; it has no outcome."""
        self.hooks.witness.counted(self.facts.attempt)
        message = "The attempt was stopped."
        end = AttemptEnd(failure_kind=STOPPED, message=message, rewards=(), spans=None, duration_s=duration_s)
        await self.call("on_rollout_end", self.hooks.hooks[::-1], self.facts, end)

    async def call(self, point: str, hooks: Sequence[NamedHook], *arguments: object) -> None:
        """Calls one method of each hook that has it, one after another."""
        for named in hooks:
            method = getattr(named.hook, point, None)
            if method is None:
                continue
            error = await self._called(named, point, method, arguments)
            if error:
                self._reported += 1
                self.hooks.report(self.facts.attempt, HookFailure(hook=named.name, point=point, error=error))

    def failure(self) -> Failed | None:
        """Returns the failure that a hook wants."""
        return Failed(kind=FailureKind.AGENT_ERROR, message=self.failed) if self.failed else None

    async def _called(self, named: NamedHook, point: str, method: Method, arguments: tuple[object, ...]) -> str:
        """Returns what went wrong, empty if nothing did."""

        async def called() -> None:
            # In here, so that wrong parameters are the hook's failure, too.
            await method(*arguments)

        task = asyncio.create_task(called(), name=f"{named.name} {point}")
        try:
            await asyncio.wait((task,), timeout=self.hooks.deadline_s)
        finally:
            if not task.done():
                self.hooks.leave_behind(task)
        if not task.done():
            return TIMED_OUT
        if task.cancelled():
            return "cancelled itself"
        error = task.exception()
        if isinstance(error, FailAttempt):
            self.failed = self.failed or cut_at_front(str(error) or f"Hook {named.name} failed the attempt.")
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
        deadline_s: How long one call may take, in seconds.
        flush_spans: Waits for the spans of an attempt.
        failure_counts: Failures so far, by hook and point.
    """

    hooks: Sequence[NamedHook]
    deadline_s: float
    witness: SpanWitness
    flush_spans: Callable[[str], Awaitable[int]]
    failure_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _left: set["asyncio.Task[Any]"] = field(default_factory=set)

    async def around(self, assignment: Assignment, run: Callable[[HookedAttempt], Awaitable[Outcome]]) -> Outcome:
        """Runs an attempt between the calls of its hooks; returns the outcome to report."""
        began_s = time.monotonic()
        attempt = HookedAttempt(hooks=self, facts=_facts_of(assignment))
        self.witness.begin(assignment.attempt)
        try:
            await attempt.call("on_rollout_start", self.hooks, attempt.facts)
            outcome = attempt.failure() or await run(attempt)
        except BaseException:
            # Stopped, or a bug of the runner's: whatever it is goes on at once.
            self._behind(attempt.stopped(time.monotonic() - began_s), name=f"end hooks of {assignment.attempt}")
            raise
        if attempt.spans is None:
            self.witness.counted(assignment.attempt)
        return await attempt.end(outcome, time.monotonic() - began_s)

    def report(self, attempt: str, failure: HookFailure) -> None:
        """Tells of a failure: log, metric, and the attempt's trace."""
        self.failure_counts[failure.hook, failure.point] += 1
        _log.warning("hook_failed", attempt=attempt, hook=failure.hook, point=failure.point, error=failure.error)
        self.witness.report(attempt, failure)

    def leave_behind(self, task: "asyncio.Task[Any]") -> None:
        """Cancels a call and waits for it no longer."""
        task.cancel()
        self._keep(task)

    async def close(self) -> None:
        """Waits for calls under way, then closes the hooks."""
        if self._left:
            await asyncio.wait(set(self._left), timeout=CLOSE_DEADLINE_S)
        for named in self.hooks[::-1]:
            closing = getattr(named.hook, "close", None)
            if closing is None:
                continue
            task = asyncio.create_task(closing(), name=f"close {named.name}")
            await asyncio.wait((task,), timeout=CLOSE_DEADLINE_S)
            if not task.done():
                self.leave_behind(task)
            elif task.cancelled() or task.exception() is not None:
                _log.warning("hook_failed", hook=named.name, point="close")

    def _behind(self, call: Coroutine[Any, Any, None], *, name: str) -> None:
        self._keep(asyncio.create_task(call, name=name))

    def _keep(self, task: "asyncio.Task[Any]") -> None:
        self._left.add(task)
        task.add_done_callback(self._left.discard)
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
