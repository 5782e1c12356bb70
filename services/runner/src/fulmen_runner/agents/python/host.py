"""Agents and graders that are Python callables in the runner's process.

Invariant: an exception in a callable ends its own attempt and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fulmen.agent import GRADER_AGENT, acting_as
from fulmen_runner.agents.python.callables import PythonCallable, python_callable
from fulmen_runner.agents.python.children import Children
from fulmen_runner.agents.python.environment_view import viewing
from fulmen_runner.agents.specification import PythonTarget
from fulmen_runner.agents.tracing.spans import AttemptSpans
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import Reward
from fulmen_runner.attempts.program import Answer, Invocation
from fulmen_runner.attempts.rewards import reward_of_number, rewards_of_grade
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_service_kit.isolation.levels import Isolation


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonHost:
    """Configuration shared by all Python agents of a runner.

    Attributes:
        stragglers: Counts threads that outlive their attempt.
        spans: Processor of their OpenTelemetry spans.
        children: Child processes for isolated agents.
    """

    stragglers: Stragglers
    spans: AttemptSpans
    children: Children

    def level(self, target: PythonTarget) -> Isolation:
        """Returns the level of a target; above `trusted` it runs in a child process.

        Raises:
            AgentFailed: If the operator requires containers or Jobs.
        """
        return self.children.host.isolation.level(target.isolation, f"the Python target {target.target}")


def python_agent(function: Callable[..., object], host: PythonHost, *, graded: bool) -> "PythonAgent":
    """Creates an agent from `name(task)` or `name(task, context)`."""
    return PythonAgent(
        entry=python_callable(function, host.stragglers, argument_count=1, steps_rewarded=True),
        spans=host.spans,
        graded=graded,
    )


def python_grader(function: Callable[..., object], host: PythonHost) -> "PythonGrader":
    """Creates a grader from `name(task, outcome)` or `name(task, outcome, context)`."""
    return PythonGrader(
        entry=python_callable(function, host.stragglers, argument_count=2, steps_rewarded=False), spans=host.spans
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonAgent:
    """An agent in the runner's process."""

    entry: PythonCallable
    spans: AttemptSpans
    graded: bool

    async def run(self, invocation: Invocation) -> Answer:
        """Calls the agent."""
        self.spans.enter(invocation.context.environment["TRACEPARENT"])
        with viewing(invocation.context.environment):
            end = await self.entry.call(invocation, invocation.task)
        # A generator's last yielded number is already the reward of its step.
        own = reward_of_number(end.value) if end.returned and not self.graded else ()
        return Answer(value=end.value, rewards=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonGrader:
    """A grader in the runner's process."""

    entry: PythonCallable
    spans: AttemptSpans

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Calls the grader. Its model calls are marked as the grader's and never trained on."""
        self.spans.enter(invocation.context.environment["TRACEPARENT"])
        try:
            with acting_as(GRADER_AGENT), viewing(invocation.context.environment):
                end = await self.entry.call(invocation, invocation.task, outcome)
            return rewards_of_grade(end.value)
        except AgentFailed as error:
            raise AgentFailed(f"grader failed: {error}") from None
