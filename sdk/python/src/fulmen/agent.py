"""The current attempt, for agents that need it. The environment has the same information.

Invariant: the current attempt is kept in a context variable, so any number of attempts can share a process. Tasks
inherit it; the runner passes it on to threads.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

FINAL_DIMENSION = "reward"
"""Default dimension of a reward."""

GRADER_AGENT = "fulmen.grader"
"""Agent name of graders' model calls, which are never trained on."""

WORK_DIR_VARIABLE = "FULMEN_WORK_DIR"
"""Variable with the attempt's own directory, set for separate processes and containers."""

PROMPTS_VARIABLE = "FULMEN_PROMPTS"
"""Variable with the rollout's prompts: a JSON object of texts by name."""

RewardKey = tuple[str, int | None, bytes]
"""A reward's dimension, step and span. Step None and span b"" score the whole attempt; a span is eight bytes."""


class NotInAttempt(RuntimeError):
    """Raised when an API of attempts is used outside an attempt."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Last progress reported by an agent: the share that is done, from 0 to 1, and what it is doing."""

    fraction: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The attempt that an agent runs in; passed to agents that take a second argument.

    Attributes:
        rollout: `projects/{project}/rollouts/{uuid}`.
        attempt: `projects/{project}/rollouts/{uuid}/attempts/{n}`.
        attempt_number: Number of the attempt, from 1; grows with each retry of the rollout.
        mode: `train`, `validation` or `test`.
        deadline: End of the attempt, on the clock of `time.monotonic`, in seconds.
        environment: Environment variables of a command: base URLs, the attempt key (secret), and the agent's own
            settings.
        resource_versions: Pinned versions of further resources, by the rollout's names for them.
        rewards: Rewards emitted so far; written by `fulmen.emit`.
        progress: Progress reported last; written by `fulmen.emit`.
        open_work_dir: Returns the attempt's own directory, created at the first call; blocks briefly. None if the
            environment names the directory or there is no directory.
        stored: The stored attempt, for a grader that rescores a rollout: a `fulmen.trajectories.stored.StoredAttempt`
            with its old rewards and its trajectory. None in a running attempt.
    """

    rollout: str
    attempt: str
    attempt_number: int
    mode: str
    deadline: float
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    resource_versions: Mapping[str, str] = field(default_factory=dict)
    rewards: dict[RewardKey, float] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress, repr=False)
    open_work_dir: Callable[[], Path] | None = field(default=None, repr=False)
    stored: object | None = field(default=None, repr=False)

    @property
    def step(self) -> int | None:
        """The current step, from 0, of an agent that is a generator; None for other agents."""
        return _step.get()

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def work_dir(self) -> Path:
        """The attempt's own directory: created empty at first use, deleted at the end of the attempt.

        The grader can read the files that the agent left there.

        Raises:
            NotInAttempt: If the attempt has ended or has no directory.
        """
        if self.open_work_dir is not None:
            return self.open_work_dir()
        if WORK_DIR_VARIABLE in self.environment:
            return Path(self.environment[WORK_DIR_VARIABLE])
        raise NotInAttempt("This attempt has no working directory: it does not run in a runner.")

    @property
    def openai_base_url(self) -> str:
        """The base URL for an OpenAI client."""
        return self.environment["OPENAI_BASE_URL"]

    @property
    def api_key(self) -> str:
        """The attempt key, for the model API. Secret: do not log it."""
        return self.environment["OPENAI_API_KEY"]

    @property
    def prompts(self) -> Mapping[str, str]:
        """Texts of the rollout's prompts, by name."""
        found: Mapping[str, str] = json.loads(self.environment.get(PROMPTS_VARIABLE) or "{}")
        return found


_current: ContextVar[Context | None] = ContextVar("fulmen_attempt", default=None)
_step: ContextVar[int | None] = ContextVar("fulmen_step", default=None)
_acting: ContextVar[str] = ContextVar("fulmen_acting", default="")


def current() -> Context | None:
    """Returns the current attempt; None outside an attempt."""
    return _current.get()


def prompt(default: str | None = None, *, name: str = "prompt") -> str:
    """Returns the rollout's prompt, such as a candidate of a search; see docs/apo.md.

    Args:
        default: Returned if the rollout has no prompt of this name, or outside a rollout.
        name: Name of the prompt.

    Raises:
        NotInAttempt: If there is neither a prompt nor a default.
    """
    context = current()
    given = json.loads(os.environ.get(PROMPTS_VARIABLE) or "{}") if context is None else context.prompts
    if name in given:
        return str(given[name])
    if default is None:
        raise NotInAttempt(f"The rollout has no prompt {name!r}, and the agent has no default.")
    return default


def current_step() -> int | None:
    """Returns the current step; None outside a generator of steps."""
    return _step.get()


def begin_step(step: int | None) -> None:
    """Sets the current step; None ends it. For code that runs generators of steps."""
    _step.set(step)


def acting_agent() -> str:
    """Returns the default agent name of model calls made here; empty if unset."""
    return _acting.get()


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Sets the default agent name of model calls in the block, such as `GRADER_AGENT`."""
    token = _acting.set(name)
    try:
        yield
    finally:
        _acting.reset(token)


def require_current() -> Context:
    """Returns the current attempt.

    Raises:
        NotInAttempt: Outside an attempt.
    """
    context = _current.get()
    if context is None:
        raise NotInAttempt(
            "No attempt is running here. A command reports rewards as its last line of output instead; in a thread that was "
            "started outside the attempt, run the work in `contextvars.copy_context()`."
        )
    return context


@contextmanager
def entered(context: Context) -> Iterator[Context]:
    """Sets the current attempt for the block; for runners and tests."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
