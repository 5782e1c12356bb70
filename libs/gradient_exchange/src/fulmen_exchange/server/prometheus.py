"""Prometheus metrics of the shards that a server holds: members, rounds, bytes and payload statuses."""

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fulmen_exchange.aggregator.effects import PayloadStatus
from fulmen_exchange.server.shards import BOUNDS_S, ServedShard

_SHARD = ["project", "run", "shard"]
_PREFIX = "fulmen_algorithm_exchange"


Held = Callable[[], Iterable[tuple[str, ServedShard]]]
"""Returns run and shard of everything that a server holds."""


class ExchangeMetrics(Collector):
    """Reads the shards at every scrape; shards without members disappear once they are dropped."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registration collects nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Builds the metric families in the scrape's thread, while rounds run: it only reads single numbers."""
        gauges = {name: GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=_SHARD) for name, text in _GAUGES.items()}
        counters = {
            name: CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=_SHARD) for name, text in _COUNTERS.items()
        }
        statuses = CounterMetricFamily(
            f"{_PREFIX}_payloads", "Payloads and chunks by status.", labels=[*_SHARD, "status"]
        )
        rounds = HistogramMetricFamily(
            f"{_PREFIX}_round_seconds", "From the first chunk of a round to its last sum.", labels=_SHARD
        )
        for name, shard in self._held():
            machine, totals = shard.machine, shard.machine.totals
            project, _, run = name.removeprefix("projects/").partition("/trainingRuns/")
            labels = [project, run, str(machine.terms.shard)]
            now = {
                "members": len(machine.members.ranks),
                "world_size": machine.terms.world_size,
                "round": machine.round,
                "epoch": machine.members.epoch,
            }
            for name, value in now.items():
                gauges[name].add_metric(labels, value)
            done = {
                "sums": totals.sums,
                "partial_sums": totals.partial_sums,
                "raw_bytes": totals.raw_bytes,
                "received_bytes": totals.received_bytes,
                "sent_bytes": totals.sent_bytes,
                "removed_members": machine.removed,
                "lost_residuals": shard.lost_residuals,
                "overflowed_elements": shard.overflowed,
            }
            for name, value in done.items():
                counters[name].add_metric(labels, value)
            for status in PayloadStatus:
                statuses.add_metric([*labels, status.value.lower()], shard.tally.statuses[status])
            limits = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
            counts = accumulate(list(shard.tally.rounds))
            rounds.add_metric(labels, list(zip(limits, counts, strict=True)), shard.tally.seconds)
        return (*gauges.values(), *counters.values(), statuses, rounds)


_GAUGES = {
    "members": "Participating ranks.",
    "world_size": "Ranks with which the first round began.",
    "round": "The newest round.",
    "epoch": "Epoch of the membership; grows with every change.",
}
_COUNTERS = {
    "sums": "Completed sums.",
    "partial_sums": "Sums made by a quorum, without all members.",
    "raw_bytes": "Summed payloads before encoding.",
    "received_bytes": "Summed payloads as received.",
    "sent_bytes": "Sums, once per receiving rank.",
    "removed_members": "Members removed because they were silent or delayed others.",
    "overflowed_elements": "Elements left out of sums because they overflowed.",
    "lost_residuals": "Starts after which the shard's residual was lost.",
}
