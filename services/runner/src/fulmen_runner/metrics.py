"""The runner's own figures, for Prometheus: read from its books at every scrape, so that attempts pay nothing."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.slots.control import SlotControl, SlotReason

SUCCESS_LABEL = "none"


class RunnerMetrics(Collector):
    """Reads the pool, and what decides its slots."""

    def __init__(self, pool: AttemptPool, control: SlotControl, *, blocked_s: Callable[[], float]) -> None:
        self._pool = pool
        self._blocked_s = blocked_s
        self._control = control

    def collect(self) -> Iterator[Metric]:
        """Yields the figures."""
        session = self._pool.session
        gauges = {
            "slots": ("Attempts that may run at once.", session.slots),
            "slots_automatic": ("1 while the runner decides its slots itself, otherwise 0.", self._control.automatic),
            "draining": ("1 once the runner drains, otherwise 0.", session.draining),
            "running": ("Attempts that run now.", len(session.running)),
            "unacknowledged": ("Reports that the store has not acknowledged yet.", session.unacknowledged_count),
            "stragglers": ("Threads and tasks that ended attempts left running.", len(self._pool.stragglers)),
        }
        for name, (description, value) in gauges.items():
            yield GaugeMetricFamily(f"fulmen_runner_{name}", description, value=value)
        ended = CounterMetricFamily(
            "fulmen_runner_attempts", "Attempts that ended, by failure kind.", labels=["failure_kind"]
        )
        for kind, count in list(session.ended_counts.items()):
            ended.add_metric([kind.value if kind is not None else SUCCESS_LABEL], count)
        yield ended
        changes = CounterMetricFamily(
            "fulmen_runner_slot_changes", "Changes of slots that the runner decided, by reason.", labels=["reason"]
        )
        for reason in SlotReason:
            changes.add_metric([reason.value], self._control.change_counts[reason])
        yield changes
        yield CounterMetricFamily(
            "fulmen_runner_loop_blocked_seconds",
            "Time in which agents blocked the event loop.",
            value=self._blocked_s(),
        )
