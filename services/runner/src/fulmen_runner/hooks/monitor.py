"""`FULMEN_RUNNER_HOOKS=fulmen_runner.hooks.monitor:Monitor`: Prometheus metrics of agents.

Invariant: label values are bounded: agents without version, at most `MAX_AGENTS`, others as `other`.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from fulmen.hooks import AttemptEnd, AttemptFacts, Hook
from fulmen_runner.hooks.windows import MAX_AGENTS, Windows, agent_of

WINDOW_S = 300.0
DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
OTHER = "other"
SUCCESS = "none"

_ROLLING = (
    ("error_rate", "error_rate", "Share of failed attempts over the last five minutes."),
    ("mean_duration_seconds", "mean_duration_s", "Mean duration of attempts over the last five minutes."),
    ("mean_reward", "mean_reward", "Mean reward of successful attempts over the last five minutes."),
    ("mean_tokens", "mean_tokens", "Mean prompt and completion tokens per attempt over the last five minutes."),
)


class Monitor(Hook):
    """Counts attempts, durations, tokens, model calls and rewards, and exports rolling means."""

    def __init__(self, *, registry: CollectorRegistry = REGISTRY, clock: Callable[[], float] = time.monotonic) -> None:
        """Registers the metrics."""
        self._registry = registry
        self._clock = clock
        self._windows = Windows(window_s=WINDOW_S)
        self._agents: set[str] = set()
        labels = ("agent", "mode")
        self._attempts = Counter(
            "fulmen_agent_attempts", "Ended attempts by failure kind.", (*labels, "failure_kind"), registry=None
        )
        self._durations = Histogram(
            "fulmen_agent_duration_seconds",
            "Duration of attempts.",
            labels,
            buckets=DURATION_BUCKETS_S,
            registry=None,
        )
        self._tokens = Counter("fulmen_agent_tokens", "Tokens of model calls.", (*labels, "kind"), registry=None)
        self._calls = Counter("fulmen_agent_model_calls", "Model calls.", labels, registry=None)
        self._errors = Counter(
            "fulmen_agent_span_errors", "Spans with an error in the runner's process.", labels, registry=None
        )
        self._reward_sum = _Sums()
        self._collectors: tuple[Collector, ...] = (
            self._attempts, self._durations, self._tokens, self._calls, self._errors, _Rolling(self),
        )  # fmt: skip
        for collector in self._collectors:
            registry.register(collector)

    async def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
        """Counts the attempt."""
        agent = self._label(agent_of(attempt))
        labels = (agent, attempt.mode)
        self._attempts.labels(*labels, end.failure_kind or SUCCESS).inc()
        self._durations.labels(*labels).observe(end.duration_s)
        if end.spans is not None:
            self._tokens.labels(*labels, "prompt").inc(end.spans.prompt_token_count)
            self._tokens.labels(*labels, "completion").inc(end.spans.completion_token_count)
            self._calls.labels(*labels).inc(end.spans.model_call_count)
            self._errors.labels(*labels).inc(end.spans.error_count)
        for reward in end.rewards:
            self._reward_sum.add((*labels, self._label(reward.dimension)), reward.value)
        self._windows.of(agent).add(end, now_s=self._clock())

    async def close(self) -> None:
        """Unregisters the metrics."""
        for collector in self._collectors:
            self._registry.unregister(collector)

    def rolling(self) -> Iterator[Metric]:
        """Yields the rolling means, and the sums of rewards, which may be negative."""
        now_s = self._clock()
        metrics = [(agent, window.metrics(now_s=now_s)) for agent, window in self._windows]
        for name, attribute, description in _ROLLING:
            gauge = GaugeMetricFamily(f"fulmen_agent_rolling_{name}", description, labels=["agent"])
            for agent, values in metrics:
                value = getattr(values, attribute)
                if value is not None:
                    gauge.add_metric([agent], value)
            yield gauge
        yield from self._reward_sum.metrics()

    def _label(self, name: str) -> str:
        if name not in self._agents and len(self._agents) >= MAX_AGENTS:
            return OTHER
        self._agents.add(name)
        return name


class _Rolling(Collector):
    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        return self._monitor.rolling()


class _Sums:
    """Sums and counts of rewards, from which a mean over any period can be computed, also of negative rewards."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], tuple[float, int]] = {}

    def add(self, labels: tuple[str, str, str], value: float) -> None:
        total, count = self._sums.get(labels, (0.0, 0))
        self._sums[labels] = total + value, count + 1

    def metrics(self) -> Iterator[Metric]:
        names = ["agent", "mode", "dimension"]
        rewards = SummaryMetricFamily("fulmen_agent_reward", "Rewards.", labels=names)
        for labels, (value, number) in list(self._sums.items()):
            rewards.add_metric(labels, number, value)
        yield rewards
