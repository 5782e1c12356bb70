"""Figures of the shards that the service holds, for Prometheus: members, rounds, bytes, and what was said of payloads."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fulmen_exchange.aggregator.effects import PayloadStatus
from fulmen_exchange.aggregator.rounds import RoundMachine
from fulmen_exchange.aggregator.tally import BOUNDS_S, Tally

_SHARD = ["project", "run", "shard"]
_PREFIX = "fulmen_algorithm_exchange"


class WatchedShard(Protocol):
    """What is looked at."""

    @property
    def machine(self) -> RoundMachine:
        """Its rounds."""

    @property
    def tally(self) -> Tally:
        """What it has answered."""

    @property
    def lost_residuals(self) -> int:
        """Starts of the server after which what it had kept back was lost."""


Held = Callable[[], Iterable[tuple[str, str, WatchedShard]]]
"""Project, run and shard of all that a service holds."""


class ExchangeMetrics(Collector):
    """Looks at the shards when it is scraped; one that is forgotten, as all ranks have left, is shown no more."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def describe(self) -> Iterable[Metric]:
        """Says that nothing is to be asked at registration."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Builds the families; called in the scrape's thread, while rounds go on: it reads numbers, one at a time."""
        gauges = {name: GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=_SHARD) for name, text in _GAUGES.items()}
        counters = {
            name: CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=_SHARD) for name, text in _COUNTERS.items()
        }
        verdicts = CounterMetricFamily(
            f"{_PREFIX}_verdicts", "What was said of payloads and of their chunks.", labels=[*_SHARD, "verdict"]
        )
        rounds = HistogramMetricFamily(
            f"{_PREFIX}_round_seconds", "From the first chunk of a round to its last sum.", labels=_SHARD
        )
        for project, run, shard in self._held():
            machine, totals = shard.machine, shard.machine.totals
            labels = [project.removeprefix("projects/"), run.removeprefix("trainingRuns/"), str(machine.terms.shard)]
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
            }
            for name, value in done.items():
                counters[name].add_metric(labels, value)
            for verdict in PayloadStatus:
                verdicts.add_metric([*labels, verdict.value.lower()], shard.tally.verdicts[verdict])
            limits = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
            counts = accumulate(list(shard.tally.rounds))
            rounds.add_metric(labels, list(zip(limits, counts, strict=True)), shard.tally.seconds)
        return (*gauges.values(), *counters.values(), verdicts, rounds)


_GAUGES = {
    "members": "Ranks that take part.",
    "world_size": "Ranks with which the first round began.",
    "round": "The newest round.",
    "epoch": "Number of the set of members; grows with every change of them.",
}
_COUNTERS = {
    "sums": "Sums that were made.",
    "partial_sums": "Of them, those of a quorum, without all members.",
    "raw_bytes": "Payloads that were summed, before encoding.",
    "received_bytes": "Payloads that were summed, as they came.",
    "sent_bytes": "Sums, counted once for each rank.",
    "removed_members": "Members that were removed: silent, or kept the others waiting.",
    "lost_residuals": "Starts after which what the shard had kept back was lost.",
}
