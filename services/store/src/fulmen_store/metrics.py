"""What the store measures about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Final

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from fulmen.kinds import CHECKED_KINDS
from fulmen_store.database.stored import unreadable_columns
from fulmen_store.runners.demand import LabelDemand
from fulmen_store.runners.forecast import Compared

__all__ = ["StoreMetrics"]

# A project may have very many sets of labels, and every one is a time series.
DEMANDS_SHOWN: Final = 100
# OpenTelemetry's own bounds are made for milliseconds.
DISPATCH_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PUBLISHERS: Final = ("admin", "service", "client")
PUBLICATION_RESULTS: Final = ("accepted", "denied", "malformed")
SCHEDULE_OUTCOMES: Final = ("created", "skipped", "missed", "failed")
SCHEDULE_BOUNDS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)
ROWS_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class StoreMetrics:
    """The store's instruments; without a provider they do nothing."""

    def __init__(self) -> None:
        self._meter = metrics.get_meter("fulmen.store")
        self._batches = self._meter.create_histogram(
            "fulmen.store.commit.rows",
            unit="{row}",
            description="Rows per group commit, by kind of work.",
            explicit_bucket_boundaries_advisory=ROWS_BOUNDS,
        )
        self._dispatched = self._meter.create_counter(
            "fulmen.store.dispatched", unit="{attempt}", description="Attempts assigned to runners."
        )
        self._claims = self._meter.create_histogram(
            "fulmen.store.dispatch.duration",
            unit="s",
            description="Time from the match of work and credit to its delivery, including the commit of the claim.",
            explicit_bucket_boundaries_advisory=DISPATCH_BOUNDS_S,
        )
        self._claims_lost = self._meter.create_counter(
            "fulmen.store.claims.lost",
            unit="{claim}",
            description="Claims whose row another replica claimed or a cancellation changed.",
        )
        self._runners_lost = self._meter.create_counter(
            "fulmen.store.runners.lost", unit="{runner}", description="Runners that disappeared while they held leases."
        )
        self._spans_rejected = self._meter.create_counter(
            "fulmen.store.spans.rejected", unit="{span}", description="Rejected spans of OTLP exports."
        )
        self._spans_repeated = self._meter.create_counter(
            "fulmen.store.spans.repeated",
            unit="{span}",
            description="Spans that were stored more than once, dropped when they were read.",
        )
        self._chunks_unreadable = self._meter.create_counter(
            "fulmen.store.chunks.unreadable", unit="{chunk}", description="Chunks that readers skipped as unreadable."
        )
        self._publications = self._meter.create_counter(
            "fulmen.store.publications",
            unit="{version}",
            description="Published versions and moved aliases by kind, role of the caller, and result.",
        )
        for kind, role, result in product(CHECKED_KINDS, PUBLISHERS, PUBLICATION_RESULTS):
            self._publications.add(0, {"kind": kind, "role": role, "result": result})
        self._unowned_cancelled = self._meter.create_counter(
            "fulmen.store.unowned.cancelled",
            unit="{rollout}",
            description="Rollouts cancelled because no algorithm service ran their training run.",
        )
        self._calls_recorded = self._meter.create_counter(
            "fulmen.store.calls.recorded", unit="{call}", description="Recorded calls of apps that were stored."
        )
        self._calls_evicted = _evictions(self._meter, "calls", "{call}", "Recorded calls")
        self._responses_evicted = _evictions(self._meter, "responses", "{response}", "Stored responses")
        self._meter.create_observable_counter(
            "fulmen.store.columns.unreadable",
            callbacks=[_observer(unreadable_columns)],
            unit="{value}",
            description="Stored messages that could not be read.",
        )
        # A counter that begins with its first trouble shows no increase by it.
        for counter in (
            self._dispatched, self._claims_lost, self._runners_lost, self._spans_rejected, self._spans_repeated,
            self._chunks_unreadable, self._unowned_cancelled, self._calls_recorded, self._calls_evicted, self._responses_evicted,
        ):  # fmt: skip
            counter.add(0)

        self._add_schedules()

    def _add_schedules(self) -> None:
        self._schedule_runs = self._meter.create_counter(
            "fulmen.store.schedule.runs", unit="{run}", description="Due times of schedules, by outcome."
        )
        for outcome in SCHEDULE_OUTCOMES:
            self._schedule_runs.add(0, {"outcome": outcome})
        self._schedule_delay = self._meter.create_histogram(
            "fulmen.store.schedule.delay",
            unit="s",
            description="Time from the due time of a schedule to its rollouts.",
            explicit_bucket_boundaries_advisory=SCHEDULE_BOUNDS_S,
        )

    def runners_lost(self, count: int) -> None:
        """Records runners that vanished while they held leases."""
        if count:
            self._runners_lost.add(count)

    def spans_rejected(self, count: int) -> None:
        """Records spans of exports that were not kept."""
        if count:
            self._spans_rejected.add(count)

    def spans_repeated(self, count: int) -> None:
        """Records stored spans that a reader dropped as repeats."""
        if count:
            self._spans_repeated.add(count)

    def calls_recorded(self, count: int) -> None:
        """Records calls of apps that were stored."""
        self._calls_recorded.add(count)

    def calls_evicted(self, count: int) -> None:
        """Records calls removed before the end of their retention for lack of space."""
        self._calls_evicted.add(count)

    def responses_evicted(self, count: int) -> None:
        """Records stored responses removed before the end of their retention for lack of space."""
        self._responses_evicted.add(count)

    def chunk_unreadable(self) -> None:
        """Records a chunk whose payload cannot be unpacked."""
        self._chunks_unreadable.add(1)

    def watch_segments(self, age_s: Callable[[], float]) -> Callable[[int], None]:
        """Reports, at every scrape, how long ago spans were last moved into segments without trouble.

        Returns what records that a segment was written, of so many bytes.
        """
        self._meter.create_observable_gauge(
            "fulmen.store.segments.pass.age",
            callbacks=[_observer(age_s)],
            unit="s",
            description="Time since this replica last moved all due spans into segments without an error.",
        )
        written = self._meter.create_counter(
            "fulmen.store.segments.written", unit="{segment}", description="Segments of spans that were written."
        )
        content = self._meter.create_counter(
            "fulmen.store.segments.bytes", unit="By", description="Bytes of spans in the segments that were written."
        )
        for counter in (written, content):
            counter.add(0)

        def record(size_bytes: int) -> None:
            written.add(1)
            content.add(size_bytes)

        return record

    def published(self, kind: str, role: str, result: str) -> None:
        """Records a publication; only kinds that services read are distinguished.

        Args:
            kind: Kind of the resource.
            role: Role of the caller.
            result: One of `PUBLICATION_RESULTS`.
        """
        shown = kind if kind in CHECKED_KINDS else "other"
        self._publications.add(1, {"kind": shown, "role": role, "result": result})

    def unowned_cancelled(self, count: int) -> None:
        """Records rollouts of a run without an owner that were cancelled."""
        self._unowned_cancelled.add(count)

    def schedule_run(self, outcome: str, delay_s: float | None) -> None:
        """Records what happened at a due time, and how long after it its rollouts were created; None if none were."""
        self._schedule_runs.add(1, {"outcome": outcome})
        if delay_s is not None:
            self._schedule_delay.record(max(0.0, delay_s))

    def watch_unowned(self, read: Callable[[], int]) -> None:
        """Reports, at every scrape, the runs that need an owner and have none."""
        self._meter.create_observable_gauge(
            "fulmen.store.unowned.runs",
            callbacks=[_observer(read)],
            description="Training runs that no algorithm service has run for a minute.",
        )

    def claims_lost(self, count: int) -> None:
        """Records claims that found their row taken."""
        self._claims_lost.add(count)

    def batch(self, name: str, rows: int) -> None:
        """Records one group commit."""
        self._batches.record(rows, {"work": name})

    def dispatched(self, count: int, latency_s: float | None) -> None:
        """Records that work was assigned, and how long after its match; None: when it was created."""
        self._dispatched.add(count)
        if latency_s is not None:
            self._claims.record(latency_s)

    def watch_queue(self, *, known: Callable[[], int], credit: Callable[[], int], runners: Callable[[], int]) -> None:
        """Reports, at every scrape, the queue as this replica knows it."""
        for name, read, text in (
            ("fulmen.store.queue.depth", known, "Waiting rollouts that this replica holds in memory."),
            ("fulmen.store.queue.open_credit", credit, "Unused credit of runners."),
            ("fulmen.store.runners", runners, "Runners connected to this replica."),
        ):
            self._meter.create_observable_gauge(name, callbacks=[_observer(read)], description=text)

    def watch_paused_agents(self, paused: Callable[[], int]) -> None:
        """Reports, at every scrape, the number of paused agent versions."""
        self._meter.create_observable_gauge(
            "fulmen.store.agents.paused",
            callbacks=[_observer(paused)],
            description="Agent versions of all projects that are paused because several runners were lost while they ran them.",
        )

    def watch_demand(self, shown: Callable[[], Sequence[LabelDemand]]) -> None:
        """Reports, at every scrape, the work of the longest queues, by project and labels."""

        def observer(read: Callable[[LabelDemand], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
            def observe(_options: CallbackOptions) -> Iterable[Observation]:
                return [
                    Observation(read(one), {"project": one.project, "labels": ",".join(sorted(one.labels))})
                    for one in shown()[:DEMANDS_SHOWN]
                ]

            return observe

        gauges: tuple[tuple[str, Callable[[LabelDemand], float], str, str], ...] = (
            ("queued", lambda one: one.queued, "", "Rollouts of all replicas that wait for a runner."),
            ("running", lambda one: one.running, "", "Rollouts of all replicas that run."),
            ("predicted_work", lambda one: one.predicted_work_s, "s", "Predicted total duration of waiting rollouts."),
        )
        for name, read, unit, text in gauges:
            self._meter.create_observable_gauge(
                f"fulmen.store.demand.{name}", callbacks=[observer(read)], unit=unit, description=text
            )

    def watch_forecasts(self, totals: Callable[[], Compared]) -> None:
        """Reports, at every scrape, how the forecasts of the demand compare with what came."""

        def errors(_options: CallbackOptions) -> Iterable[Observation]:
            found = totals()
            pairs = (("holt", found.error), ("naive", found.naive_error))
            return [Observation(value, {"method": method}) for method, value in pairs]

        self._meter.create_observable_counter(
            "fulmen.store.demand.forecast_errors",
            callbacks=[errors],
            unit="{slot}",
            description="Sum of the absolute errors of the forecasts of the demand.",
        )
        self._meter.create_observable_counter(
            "fulmen.store.demand.forecast_compared",
            callbacks=[_observer(lambda: totals().sample)],
            unit="{slot}",
            description="Sum of the demand that was compared with its forecasts.",
        )

    def watch_feed(self, lag_s: Callable[[], float]) -> None:
        """Reports, at every scrape, how long ended rollouts are hidden from those who watch the feed."""
        self._meter.create_observable_gauge(
            "fulmen.store.feed.lag",
            callbacks=[_observer(lag_s)],
            unit="s",
            description="Time that the oldest ended rollout has waited to become visible in the feed; 0 without watchers.",
        )

    def watch_database(self, is_up: Callable[[], int]) -> None:
        """Reports, at every scrape, whether PostgreSQL is available."""
        self._meter.create_observable_gauge(
            "fulmen.store.database.up",
            callbacks=[_observer(is_up)],
            description="1 while PostgreSQL answers, is writable and has space, otherwise 0.",
        )


def _evictions(meter: metrics.Meter, kind: str, unit: str, what: str) -> metrics.Counter:
    why = "removed before their retention because their project had too many bytes of them."
    return meter.create_counter(f"fulmen.store.{kind}.evicted", unit=unit, description=f"{what} {why}")


def _observer(read: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(read())]

    return observe
