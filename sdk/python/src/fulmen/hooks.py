"""Hooks of a runner: your own code at four points of every attempt.

A hook is an object with any of the four methods of `Hook`. A runner loads those that `FULMEN_RUNNER_HOOKS` names:

    class Watch(Hook):
        async def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
            if end.succeeded and end.duration_s < 0.1:
                raise FailAttempt("It cannot have done anything in this time.")

Invariant: what a hook gets is read-only and holds no secret. What goes wrong in a hook is reported and changes nothing,
except that `FailAttempt` makes the attempt fail.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fulmen.agent import FINAL_DIMENSION

__all__ = ["AttemptEnd", "AttemptFacts", "FailAttempt", "Hook", "RewardFact", "SpansSummary"]

STOPPED = "CANCELLED"
"""The failure kind that hooks see of an attempt that was stopped: cancelled, given back, or its lease lost."""


class FailAttempt(Exception):
    """Raised by a hook: the attempt fails, as if its agent had (AGENT_ERROR). The text is for a person.

    From the first two points the agent is not run at all. An attempt that failed already keeps its own reason.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """What a runner knows of an attempt before it runs.

    Attributes:
        rollout: `projects/{project}/rollouts/{uuid}`.
        attempt: `projects/{project}/rollouts/{uuid}/attempts/{n}`.
        attempt_number: From 1; grows when a rollout is tried again.
        project: `projects/{id}`.
        mode: `train`, `validation` or `test`.
        agent: `resources/{id}/versions/{n}`; empty for the agent that the runner was started with.
        input: What the agent is given.
        timeout_s: How long it may run, in seconds.
        resource_versions: The pinned versions of further resources, by the name under which the rollout gives them.
    """

    rollout: str
    attempt: str
    attempt_number: int
    project: str
    mode: str
    agent: str
    input: bytes = field(repr=False)
    input_content_type: str
    timeout_s: float
    resource_versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansSummary:
    """What was recorded of an attempt.

    Attributes:
        span_counts: Spans that ended in the runner's own process, by name; commands, containers and child processes
            send theirs to the store themselves.
        error_count: Those of them whose status is an error.
        undelivered_count: Spans that the store has not acknowledged; the attempt is INFRA if there are any.
        model_call_count: Model calls that went through the proxy.
        prompt_token_count: Tokens of their prompts.
        completion_token_count: Tokens of their answers.
    """

    span_counts: Mapping[str, int] = field(default_factory=dict)
    error_count: int = 0
    undelivered_count: int = 0
    model_call_count: int = 0
    prompt_token_count: int = 0
    completion_token_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFact:
    """One reward; without step and span (eight bytes) it scores the whole attempt."""

    value: float
    dimension: str = FINAL_DIMENSION
    step: int | None = None
    span_id: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended, as it will be reported to the store unless a hook that is called later fails it.

    Attributes:
        failure_kind: Such as `AGENT_ERROR`; empty if it succeeded.
        message: Why it failed, for a person.
        rewards: Empty if it failed.
        spans: None if it ended before its agent ran, or was stopped.
        duration_s: From the assignment to the end, in seconds.
    """

    failure_kind: str
    message: str
    rewards: tuple[RewardFact, ...]
    spans: SpansSummary | None
    duration_s: float

    @property
    def succeeded(self) -> bool:
        """True if it has rewards to train on."""
        return not self.failure_kind

    @property
    def reward(self) -> float | None:
        """The reward of the whole attempt, if it has one."""
        return next(
            (r.value for r in self.rewards if (r.dimension, r.step, r.span_id) == (FINAL_DIMENSION, None, b"")), None
        )


class Hook:
    """Base of hooks; every method does nothing. Several hooks are called in order, at ends in reverse order."""

    async def on_rollout_start(self, attempt: AttemptFacts) -> None:
        """Called when the attempt is assigned, before its agent is fetched."""

    async def on_trace_start(self, attempt: AttemptFacts) -> None:
        """Called right before the agent runs."""

    async def on_trace_end(self, attempt: AttemptFacts, spans: SpansSummary) -> None:
        """Called when agent and grader have ended and their spans are stored, or are known not to be.

        Not called of an attempt that ended before its agent ran, or was stopped.
        """

    async def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
        """Called last, once for each `on_rollout_start`, before the outcome is reported."""

    async def close(self) -> None:
        """Called when the runner stops."""
