"""Hooks of a runner: user code at four points of every attempt.

A hook is an object with any of the four methods of `Hook`. A runner loads the hooks named by `FULMEN_RUNNER_HOOKS`:

    class Watch(Hook):
        async def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
            if end.succeeded and end.duration_s < 0.1:
                raise FailAttempt("It cannot have done anything in this time.")

Invariant: the arguments of a hook are read-only and contain no secret. An exception in a hook is reported and has no
other effect, except that `FailAttempt` fails the attempt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fulmen.agent import FINAL_DIMENSION

__all__ = ["AttemptEnd", "AttemptFacts", "FailAttempt", "Hook", "RewardFact", "SpansSummary"]

STOPPED = "CANCELLED"
"""Failure kind in hooks of a stopped attempt: cancelled, released, or with a lost lease."""


class FailAttempt(Exception):
    """Raised by a hook to fail the attempt as if the agent had failed (AGENT_ERROR). The text is for a person.

    Raised at one of the first two points, it keeps the agent from running. A failed attempt keeps its own reason.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """The facts about an attempt before it runs.

    Attributes:
        rollout: `projects/{project}/rollouts/{uuid}`.
        attempt: `projects/{project}/rollouts/{uuid}/attempts/{n}`.
        attempt_number: Number of the attempt, from 1; grows with each retry of the rollout.
        project: `projects/{id}`.
        mode: `train`, `validation` or `test`.
        agent: `resources/{id}/versions/{n}`; empty for the runner's own agent.
        input: Input of the agent.
        timeout_s: Timeout, in seconds.
        resource_versions: Pinned versions of further resources, by the rollout's names for them.
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
    """The recorded spans of an attempt.

    Attributes:
        span_counts: Number of spans that ended in the runner's own process, by name; commands, containers and child
            processes send theirs to the store themselves.
        error_count: Number of those spans with an error status.
        undelivered_count: Number of spans not acknowledged by the store; if not 0, the attempt is INFRA.
        model_call_count: Number of model calls through the proxy.
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
    """The end of an attempt, as reported to the store unless a later hook fails the attempt.

    Attributes:
        failure_kind: Failure kind, such as `AGENT_ERROR`; empty on success.
        message: Reason of the failure, for a person.
        rewards: Rewards; empty if it failed.
        spans: Recorded spans; None if it ended before its agent ran, or was stopped.
        duration_s: Time from the assignment to the end, in seconds.
    """

    failure_kind: str
    message: str
    rewards: tuple[RewardFact, ...]
    spans: SpansSummary | None
    duration_s: float

    @property
    def succeeded(self) -> bool:
        """True if the attempt has rewards to train on."""
        return not self.failure_kind

    @property
    def reward(self) -> float | None:
        """The reward of the whole attempt, or None."""
        return next(
            (r.value for r in self.rewards if (r.dimension, r.step, r.span_id) == (FINAL_DIMENSION, None, b"")), None
        )


class Hook:
    """Base class of hooks; every method does nothing. Hooks are called in order, at ends in reverse order."""

    async def on_rollout_start(self, attempt: AttemptFacts) -> None:
        """Called when the attempt is assigned, before its agent is fetched."""

    async def on_trace_start(self, attempt: AttemptFacts) -> None:
        """Called right before the agent runs."""

    async def on_trace_end(self, attempt: AttemptFacts, spans: SpansSummary) -> None:
        """Called when agent and grader have ended and their spans are stored, or are known to be undelivered.

        Not called for an attempt that ended before its agent ran, or was stopped.
        """

    async def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
        """Called last, once for each `on_rollout_start`, before the outcome is reported."""

    async def close(self) -> None:
        """Called when the runner stops."""
