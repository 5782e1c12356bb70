"""The runner's Prometheus metrics, read from its state at every scrape so that attempts bear no cost."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fulmen_runner.attempts.hooks import AttemptHooks
from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.leases.guard import LeaseGuard
from fulmen_runner.slots.control import SlotControl, SlotReason

SUCCESS_LABEL = "none"


class RunnerMetrics(Collector):
    """Metrics of the pool and its slots."""

    def __init__(self, pool: AttemptPool, control: SlotControl, guard: LeaseGuard) -> None:
        self._pool = pool
        self._guard = guard
        self._control = control

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        session = self._pool.session
        gauges = {
            "slots": ("Current number of slots.", session.slots),
            "slots_automatic": ("1 if the number of slots is automatic, otherwise 0.", self._control.automatic),
            "draining": ("1 if the runner is draining, otherwise 0.", session.draining),
            "running": ("Running attempts.", len(session.running)),
            "unacknowledged": ("Reports that the store has not acknowledged.", session.unacknowledged_count),
            "stragglers": ("Threads and tasks left running by ended attempts.", len(self._pool.stragglers)),
        }
        for name, (description, value) in gauges.items():
            yield GaugeMetricFamily(f"fulmen_runner_{name}", description, value=value)
        ended = CounterMetricFamily(
            "fulmen_runner_attempts", "Ended attempts by failure kind.", labels=["failure_kind"]
        )
        for kind, count in list(session.ended_counts.items()):
            ended.add_metric([kind.value if kind is not None else SUCCESS_LABEL], count)
        yield ended
        changes = CounterMetricFamily(
            "fulmen_runner_slot_changes", "Automatic changes of the number of slots, by reason.", labels=["reason"]
        )
        for reason in SlotReason:
            changes.add_metric([reason.value], self._control.change_counts[reason])
        yield changes
        yield CounterMetricFamily(
            "fulmen_runner_loop_blocked_seconds",
            "Time in which the event loop was blocked.",
            value=self._guard.blocked_s_total,
        )


class HookMetrics(Collector):
    """Metrics of the hooks."""

    def __init__(self, hooks: AttemptHooks) -> None:
        self._hooks = hooks

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        failures = CounterMetricFamily(
            "fulmen_runner_hook_failures", "Hook calls that raised or timed out.", labels=["hook", "point"]
        )
        for (hook, point), count in list(self._hooks.failure_counts.items()):
            failures.add_metric([hook, point], count)
        yield failures
