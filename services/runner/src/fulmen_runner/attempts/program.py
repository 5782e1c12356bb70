"""An agent with its grader, ready to run: the seam between attempts and the ways to run agents."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fulmen.agent import Context
from fulmen_runner.attempts.assignment import JSON_CONTENT_TYPE, TEXT_CONTENT_TYPE, Assignment
from fulmen_runner.attempts.outcome import (
    MAX_OUTPUT_BYTES,
    Failed,
    FailureKind,
    Outcome,
    Output,
    Reward,
    Succeeded,
    cut_at_front,
)
from fulmen_runner.attempts.rewards import joined, rewards_of_emitted
from fulmen_runner.attempts.uses import Uses
from fulmen_runner.attempts.workspace import Workspace


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far an attempt is; `part` is `agent` or `grader`."""

    part: str = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One run of a program.

    Attributes:
        task: The decoded input.
        context: What the agent may know; its environment is the attempt's.
        workspace: The attempt's files, for agents that want some.
        progress: Written by the program while it runs.
    """

    assignment: Assignment
    task: object
    context: Context
    workspace: Workspace
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an agent returned, and the rewards that it gave itself.

    Attributes:
        rewards: Read from what it returned.
        emitted: Given while it ran, beside those in the context.
    """

    value: object
    rewards: tuple[Reward, ...] = ()
    emitted: tuple[Reward, ...] = ()


class Agent(Protocol):
    """Runs a task; raises AgentFailed. Being cancelled, it ends everything that it started."""

    async def run(self, invocation: Invocation) -> Answer:
        """Returns what the agent answered."""


class Grader(Protocol):
    """Scores an outcome; raises AgentFailed. Being cancelled, it ends everything that it started."""

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Returns the rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An agent, how its outcome is scored, and the environment that its publisher gave it: templates by name.

    Attributes:
        files: Who uses the files that it is made of; None if it has none.
    """

    agent: Agent
    grader: Grader | None
    environment: Mapping[str, str]
    files: Uses | None = None

    def begin_use(self) -> bool:
        """Keeps its files; tells whether they are still there. Every use that begins ends by `end_use`."""
        return self.files is None or self.files.begin()

    def end_use(self) -> None:
        """Lets its files go, if nobody else uses them."""
        if self.files is not None:
            self.files.end()

    async def run(self, invocation: Invocation) -> Outcome:
        """Runs the agent, then the grader.

        Raises:
            AgentFailed: If either fails.
        """
        answer = await self.agent.run(invocation)
        invocation.progress.part = "grader"
        graded = await self.grader.grade(invocation, answer.value) if self.grader is not None else ()
        # A grader's word goes before the agent's own return value, which may be a number that means something else.
        own = () if self.grader is not None else answer.rewards
        rewards = joined(rewards_of_emitted(invocation.context.rewards), answer.emitted, own, graded)
        output = encode_output(answer.value)
        if not rewards:
            message = "The agent ended well, but neither it nor a grader gave a reward."
            if self.grader is not None:
                message = "The agent ended well, but its grader returned no reward, and neither of them emitted one."
            return Failed(kind=FailureKind.REWARD_MISSING, message=message, output=output)
        return Succeeded(rewards=rewards, output=output)


def encode_output(value: object) -> Output:
    """Encodes what an agent returned: text as it is, anything else as JSON, or as text if that cannot be."""
    if value is None:
        return Output()
    if isinstance(value, str):
        return _text(value)
    try:
        content = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError):
        return _text(f"{type(value).__module__}.{type(value).__qualname__} object, which JSON cannot hold")
    if len(content) > MAX_OUTPUT_BYTES:
        return _text(content.decode())
    return Output(content=content, content_type=JSON_CONTENT_TYPE)


def _text(text: str) -> Output:
    return Output(content=cut_at_front(text, MAX_OUTPUT_BYTES).encode(errors="replace"), content_type=TEXT_CONTENT_TYPE)
