"""Hooks see an attempt from its beginning to its end, and change nothing of it unless they say so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fulmen.errors import SettingsInvalid
from fulmen.hooks import AttemptEnd, AttemptFacts, FailAttempt, Hook, SpansSummary
from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.hooks import TIMED_OUT, AttemptHooks, HookedAttempt, HookFailure, NamedHook, load_hooks
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Reward, Succeeded
from tests.support.runner.assignments import assignment

POINTS = ("on_rollout_start", "on_trace_start", "on_trace_end", "on_rollout_end")
SUCCESS = Succeeded(rewards=(Reward(value=1.0), Reward(value=0.5, step=2)))
FAILED = Failed(kind=FailureKind.TIMEOUT, message="too late")
EVIDENCE = CaptureEvidence(call_count=2, prompt_token_count=10, completion_token_count=5)


class CountedSpans:
    """Spans of every attempt: two plans and one error."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.reports: list[HookFailure] = []

    def begin(self, attempt: str) -> None:
        self.open.add(attempt)

    def finish(self, attempt: str) -> tuple[dict[str, int], int]:
        self.open.discard(attempt)
        return {"plan": 2}, 1

    def report(self, attempt: str, failure: HookFailure) -> None:
        self.reports.append(failure)


class Recorder(Hook):
    """Notes its calls; at one point it does what the test wants."""

    def __init__(
        self, name: str, calls: list[object], point: str = "", act: Callable[[], Awaitable[None]] | None = None
    ):
        self._name, self._calls, self._point, self._act = name, calls, point, act

    async def _called(self, point: str, *seen: object) -> None:
        self._calls.append((self._name, point, *seen))
        if point == self._point and self._act is not None:
            await self._act()

    async def on_rollout_start(self, attempt: AttemptFacts) -> None:
        await self._called("on_rollout_start")

    async def on_trace_start(self, attempt: AttemptFacts) -> None:
        await self._called("on_trace_start")

    async def on_trace_end(self, attempt: AttemptFacts, spans: SpansSummary) -> None:
        await self._called("on_trace_end", spans)

    async def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
        await self._called("on_rollout_end", end)


def hooks_of(*hooks: object, deadline_s: float = 5.0) -> AttemptHooks:
    async def flush(_: str) -> int:
        return 0

    named = tuple(NamedHook(name=f"h{index}", hook=hook) for index, hook in enumerate(hooks))
    return AttemptHooks(hooks=named, timeout_s=deadline_s, spans=CountedSpans(), flush_spans=flush)


def running(outcome: Outcome) -> Callable[[HookedAttempt], Awaitable[Outcome]]:
    async def run(attempt: HookedAttempt) -> Outcome:
        failed = await attempt.trace_start()
        if failed is not None:
            return failed
        await attempt.trace_end(EVIDENCE, 0)
        return outcome

    return run


async def test_hooks_are_called_in_order_and_at_ends_in_reverse() -> None:
    calls: list[tuple[object, ...]] = []
    hooks = hooks_of(Recorder("a", calls), Recorder("b", calls))
    assert await hooks.around(assignment(), running(SUCCESS)) is SUCCESS
    assert [(name, point) for name, point, *_ in calls] == [
        *[(name, point) for point in POINTS[:2] for name in "ab"],
        *[(name, point) for point in POINTS[2:] for name in "ba"],
    ]
    spans, end = calls[4][2], calls[6][2]
    assert (spans.span_counts, spans.error_count, spans.prompt_token_count) == ({"plan": 2}, 1, 10)
    assert (end.succeeded, end.reward, len(end.rewards), end.spans) == (True, 1.0, 2, spans)
    assert not hooks.spans.open


async def raises() -> None:
    raise ValueError("broken")


async def hangs() -> None:
    await asyncio.Event().wait()


async def ignores_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(0.3)
            return
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    ("act", "error"),
    [(raises, "ValueError: broken"), (hangs, TIMED_OUT), (ignores_cancellation, TIMED_OUT)],
)
@pytest.mark.parametrize("outcome", [SUCCESS, FAILED])
async def test_what_goes_wrong_in_a_hook_is_reported_and_changes_nothing(
    point: str, act: Callable[[], Awaitable[None]], error: str, outcome: Outcome
) -> None:
    calls: list[tuple[object, ...]] = []
    hooks = hooks_of(Recorder("a", calls, point, act), Recorder("b", calls), deadline_s=0.02)
    assert await hooks.around(assignment(), running(outcome)) is outcome
    assert hooks.spans.reports == [HookFailure(hook="h0", point=point, error=error)]
    assert hooks.failure_counts == {("h0", point): 1}
    assert len(calls) == 8
    await hooks.close()


async def test_a_hook_with_wrong_parameters_or_missing_methods_harms_nothing() -> None:
    class Half:
        async def on_rollout_end(self) -> None:
            """Takes nothing."""

    hooks = hooks_of(Half())
    assert await hooks.around(assignment(), running(SUCCESS)) is SUCCESS
    [report] = hooks.spans.reports
    assert report.error.startswith("TypeError")


@pytest.mark.parametrize("point", POINTS)
async def test_a_hook_may_fail_an_attempt(point: str) -> None:
    async def refuse() -> None:
        raise FailAttempt("not like this")

    calls: list[tuple[object, ...]] = []
    hooks = hooks_of(Recorder("a", calls), Recorder("b", calls, point, refuse))
    outcome = await hooks.around(assignment(), running(SUCCESS))
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.message) == (FailureKind.AGENT_ERROR, "not like this")
    assert not hooks.failure_counts
    assert calls[-1][:2] == ("a", "on_rollout_end")
    # It is called after the one that refuses, and counts what will be reported.
    assert (calls[-1][2].failure_kind, calls[-1][2].rewards) == ("AGENT_ERROR", ())
    if point in POINTS[:2]:
        assert not any(call[1] == "on_trace_end" for call in calls)
    assert not hooks.spans.open


async def test_an_attempt_that_failed_keeps_its_own_reason() -> None:
    async def refuse() -> None:
        raise FailAttempt("not like this")

    hooks = hooks_of(Recorder("a", [], "on_rollout_end", refuse))
    assert await hooks.around(assignment(), running(FAILED)) is FAILED


async def test_hooks_hear_of_an_attempt_that_is_stopped_without_delaying_it() -> None:
    calls: list[tuple[object, ...]] = []
    begun = asyncio.Event()

    async def run(attempt: HookedAttempt) -> Outcome:
        await attempt.trace_start()
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    hooks = hooks_of(Recorder("a", calls, "on_rollout_end", hangs), deadline_s=0.05)
    task = asyncio.create_task(hooks.around(assignment(), run))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await hooks.close()
    assert [call[1] for call in calls] == ["on_rollout_start", "on_trace_start", "on_rollout_end"]
    end = calls[-1][2]
    assert (end.failure_kind, end.rewards, end.spans) == ("CANCELLED", (), None)


class Listening:
    async def on_trace_end(self, attempt: AttemptFacts, spans: SpansSummary) -> None:
        """Hears one thing only."""


class Deaf:
    pass


class Synchronous:
    def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
        """Would block."""


INSTANCE = Listening()


def test_hooks_are_instances_or_classes() -> None:
    one, other = load_hooks([f"{__name__}:INSTANCE", f"{__name__}:Listening"])
    assert one.hook is INSTANCE
    assert isinstance(other.hook, Listening)


def test_all_hooks_that_cannot_be_loaded_are_named_at_once() -> None:
    targets = ["nowhere:x", f"{__name__}:absent", f"{__name__}:Deaf", f"{__name__}:Synchronous", "shapeless"]
    with pytest.raises(SettingsInvalid) as caught:
        load_hooks([f"{__name__}:INSTANCE", *targets])
    problems = [violation.description for violation in caught.value.violations]
    assert [problem.partition(": ")[0] for problem in problems] == targets
    assert "has none of" in problems[2]
    assert "not an async method" in problems[3]
