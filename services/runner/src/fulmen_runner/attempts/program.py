"""An agent and its grader, ready to run: the interface between attempts and the kinds of agents."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
from fulmen_runner.attempts.printed import PrintedTails
from fulmen_runner.attempts.rewards import joined, rewards_of_emitted
from fulmen_runner.attempts.uses import Uses
from fulmen_runner.attempts.workspace import Workspace


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of an attempt; `part` is `agent` or `grader`, whichever is running."""

    part: str = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One run of a program.

    Attributes:
        assignment: The attempt.
        task: The decoded input.
        context: The agent's view of the attempt.
        workspace: The attempt's files, created on first use.
        progress: Updated by the program.
        printed: Gets the end of what the agent prints.
    """

    assignment: Assignment
    task: object
    context: Context
    workspace: Workspace
    progress: Progress = field(default_factory=Progress)
    printed: PrintedTails = field(default_factory=PrintedTails)

    @property
    def kept_tails(self) -> PrintedTails:
        """Where the process that runs now leaves the end of what it prints: nowhere, if it is the grader's."""
        return self.printed if self.progress.part == "agent" else PrintedTails()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An agent's return value and its own rewards.

    Attributes:
        value: The return value.
        rewards: Rewards read from the return value.
        emitted: Rewards emitted while it ran, besides those in the context.
    """

    value: object
    rewards: tuple[Reward, ...] = ()
    emitted: tuple[Reward, ...] = ()


class Agent(Protocol):
    """An agent of any kind. On cancellation, it ends everything that it started."""

    async def run(self, invocation: Invocation) -> Answer:
        """Runs the agent. Raises AgentFailed."""


class Grader(Protocol):
    """A grader of any kind. On cancellation, it ends everything that it started."""

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Returns the rewards of an agent's return value. Raises AgentFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An agent with its grader.

    Attributes:
        agent: The agent.
        grader: None if the agent gives its own rewards.
        environment: Variables of the agent's specification; values are templates.
        secrets: Names of the secrets that attempts get.
        files: Reference count of the unpacked bundle; None if there is none.
        folder: Parent of its attempts' files, which its children may write; None for the folder of all attempts.
    """

    agent: Agent
    grader: Grader | None
    environment: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    files: Uses | None = None
    folder: Path | None = None

    def begin_use(self) -> bool:
        """Holds the files; returns False if they are already released. Pair with `end_use`."""
        return self.files is None or self.files.begin()

    def end_use(self) -> None:
        """Releases the files."""
        if self.files is not None:
            self.files.end()

    async def run(self, invocation: Invocation) -> Outcome:
        """Runs the agent, then the grader. Raises AgentFailed if either fails."""
        answer = await self.agent.run(invocation)
        invocation.progress.part = "grader"
        graded = await self.grader.grade(invocation, answer.value) if self.grader is not None else ()
        # With a grader, the agent's return value is data: a number in it need not be a reward.
        own = () if self.grader is not None else answer.rewards
        rewards = joined(rewards_of_emitted(invocation.context.rewards), answer.emitted, own, graded)
        output = encode_output(answer.value)
        if not rewards:
            message = "agent succeeded, but neither it nor a grader returned a reward"
            if self.grader is not None:
                message = "agent succeeded, but its grader returned no reward and none was emitted"
            return Failed(kind=FailureKind.REWARD_MISSING, message=message, output=output)
        return Succeeded(rewards=rewards, output=output)


def encode_output(value: object) -> Output:
    """Encodes a return value: a string as text, anything else as JSON, or as text if JSON cannot represent it."""
    if value is None:
        return Output()
    if isinstance(value, str):
        return _text(value)
    try:
        content = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError):
        return _text(f"{type(value).__module__}.{type(value).__qualname__} object, not representable in JSON")
    if len(content) > MAX_OUTPUT_BYTES:
        return _text(content.decode())
    return Output(content=content, content_type=JSON_CONTENT_TYPE)


def _text(text: str) -> Output:
    return Output(content=cut_at_front(text, MAX_OUTPUT_BYTES).encode(errors="replace"), content_type=TEXT_CONTENT_TYPE)
