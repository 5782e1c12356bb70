"""Metrics of agents over a sliding window of ended attempts.

Invariant: an attempt counts for the length of the window; above `MAX_SAMPLES` the oldest are dropped. Stopped attempts
(cancelled, released) do not count.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from fulmen.hooks import STOPPED, AttemptEnd, AttemptFacts

MAX_SAMPLES = 10_000
MAX_AGENTS = 100
SAMPLES_PER_UPDATE = 256
"""Number of samples that may be read per new sample."""

DEFAULT_AGENT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMetrics:
    """Metrics of an agent's attempts in a window; None without samples.

    Attributes:
        attempt_count: Number of attempts.
        error_rate: Share of failed attempts, 0 to 1.
        mean_duration_s: Mean duration, in seconds.
        mean_reward: Mean final reward of successful attempts.
        mean_tokens: Mean number of prompt and completion tokens.
        reward_drop: Mean reward of the earlier half of the window minus that of the later half.
    """

    attempt_count: int
    error_rate: float | None
    mean_duration_s: float | None
    mean_reward: float | None
    mean_tokens: float | None
    reward_drop: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    at_s: float
    failed: bool
    duration_s: float
    reward: float | None
    tokens: int


@dataclass(slots=True, kw_only=True)
class Window:
    """The recent attempts of one agent. Times are monotonic seconds, passed in by the caller."""

    window_s: float
    _samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    _new_count: int = 0

    @property
    def is_due(self) -> bool:
        """Whether enough samples are new to read all of them again."""
        return self._new_count * SAMPLES_PER_UPDATE >= len(self._samples)

    def add(self, end: AttemptEnd, *, now_s: float) -> None:
        """Adds an attempt that has ended now."""
        if end.failure_kind == STOPPED:
            return
        self._new_count += 1
        self._samples.append(
            _Sample(
                at_s=now_s,
                failed=not end.succeeded,
                duration_s=end.duration_s,
                reward=end.reward,
                tokens=end.spans.prompt_token_count + end.spans.completion_token_count if end.spans else 0,
            )
        )

    def metrics(self, *, now_s: float) -> AgentMetrics:
        """Returns the metrics of the attempts in the window."""
        self._new_count = 0
        while self._samples and self._samples[0].at_s <= now_s - self.window_s:
            self._samples.popleft()
        samples = list(self._samples)
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        half = len(rewards) // 2
        earlier, later = _mean(rewards[:half]), _mean(rewards[half:])
        return AgentMetrics(
            attempt_count=len(samples),
            error_rate=_mean([sample.failed for sample in samples]),
            mean_duration_s=_mean([sample.duration_s for sample in samples]),
            mean_reward=_mean(rewards),
            mean_tokens=_mean([sample.tokens for sample in samples]),
            reward_drop=None if earlier is None or later is None else earlier - later,
        )


@dataclass(slots=True, kw_only=True)
class Windows:
    """The windows by agent; above `MAX_AGENTS` the least recently used is dropped."""

    window_s: float
    _windows: "OrderedDict[str, Window]" = field(default_factory=OrderedDict)

    def of(self, agent: str) -> Window:
        """Returns the window of an agent."""
        window = self._windows.setdefault(agent, Window(window_s=self.window_s))
        self._windows.move_to_end(agent)
        if len(self._windows) > MAX_AGENTS:
            self._windows.popitem(last=False)
        return window

    def __iter__(self) -> Iterator[tuple[str, Window]]:
        """Yields agents and their windows."""
        return iter(list(self._windows.items()))


def agent_of(attempt: AttemptFacts) -> str:
    """Returns the agent's id without version; `default` if the rollout names none."""
    return attempt.agent.removeprefix("resources/").partition("/versions/")[0] or DEFAULT_AGENT


def _mean(values: list[float] | list[int] | list[bool]) -> float | None:
    return sum(values) / len(values) if values else None
