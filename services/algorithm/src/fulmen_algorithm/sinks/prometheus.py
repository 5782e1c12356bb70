"""Gauges of the service's runs for Prometheus: state, step, and the newest value of every metric."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import RunState

_RUN = ["project", "run"]


class RunMetrics(Collector):
    """Collects metrics of runs when scraped; ended runs are only counted.

    `fulmen_algorithm_runs{state}`; for each run that is not final `fulmen_algorithm_run_state{state}`, `..._run_step`,
    `..._run_steps_planned`, `..._run_waits_for_storage` and `fulmen_algorithm_run_metric{metric}`, where metrics are named as in
    `StepMetrics.values`, units included.
    """

    def __init__(self, runs: RunRegistry) -> None:
        self._runs = runs

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that nothing is collected at registration."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Builds the families; called in the scrape's thread."""
        entries = [entry for entry in self._runs.entries() if not entry.elsewhere]
        states = GaugeMetricFamily("fulmen_algorithm_runs", "Training runs by state.", labels=["state"])
        for state in RunState:
            states.add_metric([state.value.lower()], sum(e.run.state is state for e in entries))
        run_state = GaugeMetricFamily(
            "fulmen_algorithm_run_state", "1 for the state that a run is in.", labels=[*_RUN, "state"]
        )
        step = GaugeMetricFamily("fulmen_algorithm_run_step", "Completed steps of a run.", labels=_RUN)
        planned = GaugeMetricFamily("fulmen_algorithm_run_steps_planned", "Planned steps of a run.", labels=_RUN)
        metric = GaugeMetricFamily(
            "fulmen_algorithm_run_metric", "Newest value of a metric of a run.", labels=[*_RUN, "algorithm", "metric"]
        )
        waiting = GaugeMetricFamily(
            "fulmen_algorithm_run_waits_for_storage",
            "1 while a run is paused because its storage is full or cannot be reached.",
            labels=_RUN,
        )
        for entry in entries:
            run = entry.run
            if run.state.final:
                continue
            labels = [run.project.removeprefix("projects/"), run.run_id]
            run_state.add_metric([*labels, run.state.value.lower()], 1)
            step.add_metric(labels, run.step)
            waiting.add_metric(labels, float(bool(entry.waiting_reason)))
            planned.add_metric(labels, run.step_count)
            for name, value in entry.events.latest_metrics.items():
                metric.add_metric([*labels, run.algorithm, name], value)
        return (states, run_state, step, planned, waiting, metric)
