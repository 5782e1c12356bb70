"""The current attempt, for agents that want to know. The environment has the same information.

Invariant: the current attempt lives in a context variable, so that any number of attempts share one process; it is
carried into tasks, and by the runner into threads.
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
"""The dimension of a reward that names none."""

GRADER_AGENT = "fulmen.grader"
"""The agent name of model calls that score and are never trained on."""

WORK_DIR_VARIABLE = "FULMEN_WORK_DIR"
"""Names the attempt's own directory in the environment of what runs in a process or a container of its own."""

PROMPTS_VARIABLE = "FULMEN_PROMPTS"
"""Holds the rollout's prompts in the environment of agents: a JSON object of texts by name."""

RewardKey = tuple[str, int | None, bytes]
"""A reward's dimension, step and span. Step None and span b"" score the whole attempt; a span is eight bytes."""


class NotInAttempt(RuntimeError):
    """Raised when an API of attempts is used outside of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The attempt that an agent runs in; the runner gives it to agents that take a second argument.

    Attributes:
        rollout: `projects/{project}/rollouts/{uuid}`.
        attempt: `projects/{project}/rollouts/{uuid}/attempts/{n}`.
        attempt_number: From 1; grows when a rollout is tried again.
        mode: `train`, `validation` or `test`.
        deadline: When the attempt is ended, on the clock of `time.monotonic`, in seconds.
        environment: What a command would find in its environment: base URLs, the attempt's key (secret), and the
            agent's own settings.
        resource_versions: The pinned versions of further resources, by the name under which the rollout gives them.
        rewards: What was emitted so far; written by `fulmen.emit`.
        open_work_dir: Makes the attempt's own directory, if there is none yet, and returns it; blocks for a moment.
            None: the environment names it, if there is one.
        stored: For a grader that scores a stored rollout again: what the store has of the attempt, a
            `fulmen.trajectories.stored.StoredAttempt` with its old rewards and its trajectory. None in an attempt that runs.
    """

    rollout: str
    attempt: str
    attempt_number: int
    mode: str
    deadline: float
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    resource_versions: Mapping[str, str] = field(default_factory=dict)
    rewards: dict[RewardKey, float] = field(default_factory=dict)
    open_work_dir: Callable[[], Path] | None = field(default=None, repr=False)
    stored: object | None = field(default=None, repr=False)

    @property
    def step(self) -> int | None:
        """The step, from 0, that this code belongs to, of an agent that is a generator; None in any other."""
        return _step.get()

    @property
    def remaining_s(self) -> float:
        """Seconds until the attempt is ended; never negative."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def work_dir(self) -> Path:
        """The attempt's own directory: made when it is first asked for, empty then, deleted at the attempt's end.

        The grader finds there what the agent left.

        Raises:
            NotInAttempt: If the attempt has ended, or has none.
        """
        if self.open_work_dir is not None:
            return self.open_work_dir()
        if WORK_DIR_VARIABLE in self.environment:
            return Path(self.environment[WORK_DIR_VARIABLE])
        raise NotInAttempt("This attempt has no directory of its own: it does not run in a runner.")

    @property
    def openai_base_url(self) -> str:
        """The base URL for an OpenAI client."""
        return self.environment["OPENAI_BASE_URL"]

    @property
    def api_key(self) -> str:
        """The attempt's own key for the model API. Secret: do not log it."""
        return self.environment["OPENAI_API_KEY"]

    @property
    def prompts(self) -> Mapping[str, str]:
        """The texts of the prompts that the rollout gives, by name."""
        found: Mapping[str, str] = json.loads(self.environment.get(PROMPTS_VARIABLE) or "{}")
        return found


_current: ContextVar[Context | None] = ContextVar("fulmen_attempt", default=None)
_step: ContextVar[int | None] = ContextVar("fulmen_step", default=None)
_acting: ContextVar[str] = ContextVar("fulmen_acting", default="")


def current() -> Context | None:
    """Returns the current attempt; None outside of one."""
    return _current.get()


def prompt(default: str | None = None, *, name: str = "prompt") -> str:
    """Returns the prompt that the rollout gives, such as a candidate of a search; see docs/apo.md.

    Args:
        default: What to return if the rollout gives none of this name, or there is no rollout.
        name: Of several prompts, which.

    Raises:
        NotInAttempt: If the rollout gives none and there is no default.
    """
    context = current()
    given = json.loads(os.environ.get(PROMPTS_VARIABLE) or "{}") if context is None else context.prompts
    if name in given:
        return str(given[name])
    if default is None:
        raise NotInAttempt(f"The rollout gives no prompt {name!r}, and the agent has no default.")
    return default


def current_step() -> int | None:
    """Returns the current step; None outside of generators of steps."""
    return _step.get()


def begin_step(step: int | None) -> None:
    """Sets the current step; None ends the last one. For code that runs generators of steps."""
    _step.set(step)


def acting_agent() -> str:
    """Returns the agent name that model calls of this code get where they name none; empty for none."""
    return _acting.get()


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Sets the agent name of model calls in the body, such as `GRADER_AGENT`."""
    token = _acting.set(name)
    try:
        yield
    finally:
        _acting.reset(token)


def require_current() -> Context:
    """Returns the attempt that this code runs in.

    Raises:
        NotInAttempt: If it runs in none.
    """
    context = _current.get()
    if context is None:
        raise NotInAttempt(
            "No attempt runs here. A command reports rewards as its last line of output instead; in a thread that was "
            "started outside of the attempt, run the work in `contextvars.copy_context()`."
        )
    return context


@contextmanager
def entered(context: Context) -> Iterator[Context]:
    """Sets the current attempt for the body; for runners and tests."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
