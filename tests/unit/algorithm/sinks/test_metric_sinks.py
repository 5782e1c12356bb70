"""Metrics of runs reach TensorBoard, Weights & Biases and MLflow, read back by their own libraries."""

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicySpec, RunState, TrainingRun
from fulmen_algorithm.sinks.prometheus import RunMetrics
from fulmen_algorithm.sinks.publisher import MetricPublisher
from fulmen_algorithm.sinks.sink import OpenSink, load_sink
from tests.support.algorithm.new_run import now, training_run
from tests.support.algorithm.vllm import settled

NAME = "projects/default/trainingRuns/arithmetic-1"
RUN = training_run(
    name=NAME,
    settings_json=json.dumps({"steps": 3, "learning_rate": 0.001}),
    policy=PolicySpec(name="arithmetic"),
    step_count=3,
)


@pytest.fixture
def runs(tmp_path: Path) -> RunRegistry:
    made = RunRegistry(RunStorage(tmp_path), clock=now)
    made.add(RUN)
    made.move(NAME, RunState.RUNNING)
    return made


def measure(runs: RunRegistry, *steps: int) -> None:
    for step in steps:
        metrics = {"reward_mean": step / 10, "loss": -float(step)}
        runs.entry(NAME).events.step_done(StepMetrics(step=step, values=metrics))


def publisher(runs: RunRegistry, folder: Path, *names: str) -> MetricPublisher:
    return MetricPublisher(runs, {name: load_sink(name) for name in names})


async def ended(publisher: MetricPublisher, runs: RunRegistry) -> None:
    runs.move(NAME, RunState.SUCCEEDED)
    await publisher.carry()


def drawn(folder: Path) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder / "runs/default/arithmetic-1/tensorboard"))
    accumulator.Reload()
    return [(event.step, round(event.value, 6)) for event in accumulator.Scalars("reward_mean")]


async def test_tensorboard_reads_every_step_once_over_a_restart_of_the_service(runs, tmp_path):
    first = publisher(runs, tmp_path, "tensorboard")
    measure(runs, 1, 2)
    await first.carry()
    second = publisher(runs, tmp_path, "tensorboard")
    measure(runs, 3)
    await second.carry()
    await ended(second, runs)

    assert drawn(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.3)]


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"sequence": null}', b"\xff"])
async def test_a_position_that_is_damaged_costs_no_step_and_does_not_end_the_role(runs, tmp_path, damaged):
    first = publisher(runs, tmp_path, "tensorboard")
    measure(runs, 1, 2)
    await first.carry()
    (runs.entry(NAME).files.journal / "metrics.json").write_bytes(damaged)
    second = publisher(runs, tmp_path, "tensorboard")
    measure(runs, 3)
    await second.carry()
    await ended(second, runs)

    assert drawn(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.3)]


async def test_a_step_that_is_done_again_is_drawn_once(runs, tmp_path):
    carrying = publisher(runs, tmp_path, "tensorboard")
    measure(runs, 1, 2, 3)
    await carrying.carry()
    measure(runs, 2, 3)
    await carrying.carry()
    await ended(carrying, runs)

    assert drawn(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.3)]


async def test_mlflow_holds_settings_metrics_and_final_state(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    carrying = publisher(runs, tmp_path, "mlflow")
    measure(runs, 1, 2)
    await carrying.carry()
    again = publisher(runs, tmp_path, "mlflow")
    measure(runs, 3)
    await again.carry()
    await ended(again, runs)

    from mlflow.tracking import MlflowClient  # takes seconds, in every process of the tests

    client = MlflowClient()
    experiment = client.get_experiment_by_name("default/arithmetic")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["learning_rate"] == "0.001"
    history = client.get_metric_history(found.info.run_id, "reward_mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]


async def test_wandb_takes_metrics_offline(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    carrying = publisher(runs, tmp_path, "wandb")
    measure(runs, 1, 2)
    await carrying.carry()
    await ended(carrying, runs)

    (written,) = (tmp_path / "runs/default/arithmetic-1" / "wandb").glob("offline-run-*/run-arithmetic-1.wandb")
    # Its own process writes what is left after `finish` has returned.
    await settled(lambda: b"reward_mean" in written.read_bytes())


class BrokenSink:
    def __init__(self, run: TrainingRun, folder: Path, settings: Mapping[str, Any]) -> None:
        pass

    def write(self, steps: list[StepMetrics]) -> None:
        raise OSError("away")

    def close(self, run: TrainingRun) -> None:
        raise AssertionError("a sink that was given up is not used again")


async def test_a_broken_sink_is_reported_once_and_holds_nothing_up(runs, tmp_path):
    broken: OpenSink = BrokenSink
    sinks = {"broken": broken, "tensorboard": load_sink("tensorboard")}
    carrying = MetricPublisher(runs, sinks)
    for step in (1, 2, 3):
        measure(runs, step)
        await carrying.carry()
    await ended(carrying, runs)

    assert drawn(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    warnings = [n.message for n in runs.entry(NAME).events.notices()]
    assert warnings == ["broken accepts no more metrics of this run; see the service's log."]


async def test_a_sink_that_never_answers_is_given_up_and_holds_no_other_up(runs, tmp_path):
    never = threading.Event()
    written: list[int] = []

    class SilentSink(BrokenSink):
        def write(self, steps: list[StepMetrics]) -> None:
            never.wait()

    class ListSink(BrokenSink):
        def write(self, steps: list[StepMetrics]) -> None:
            written.extend(step.step for step in steps)

        def close(self, run: TrainingRun) -> None:
            written.append(run.step_count)

    silent: OpenSink = SilentSink
    listing: OpenSink = ListSink
    # A deadline that the other sink keeps on the busiest machine.
    carrying = MetricPublisher(runs, {"silent": silent, "list": listing}, deadline_s=3.0)
    for step in (1, 2):
        measure(runs, step)
        await carrying.carry()
    await ended(carrying, runs)

    assert written == [1, 2, 3]
    warnings = [n.message for n in runs.entry(NAME).events.notices()]
    assert warnings == ["silent accepts no more metrics of this run; see the service's log."]
    # Nor does it hold up the end of the process, which waits for all threads but these.
    left = [thread for thread in threading.enumerate() if thread.name == "sink-silent"]
    assert [thread.daemon for thread in left] == [True]
    never.set()


async def test_the_position_of_a_sink_is_replaced_atomically(runs, tmp_path):
    carrying = publisher(runs, tmp_path, "tensorboard")
    measure(runs, 1)
    await carrying.carry()
    position, before = tmp_path / "runs/default/arithmetic-1/journal-00000000/metrics.json", tmp_path / "before"
    os.link(position, before)
    content = before.read_bytes()
    measure(runs, 2)
    await carrying.carry()

    # Another file took its place: this one was never cut to be written again, where a kill would have left it empty.
    assert position.read_bytes() != content
    assert before.read_bytes() == content


def test_prometheus_shows_the_newest_metrics_of_live_runs_only(runs):
    registry = CollectorRegistry()
    registry.register(RunMetrics(runs))
    measure(runs, 1, 2)
    labels = {"project": "default", "run": "arithmetic-1", "algorithm": "grpo", "metric": "reward_mean"}

    assert registry.get_sample_value("fulmen_algorithm_run_metric", labels) == 0.2
    assert registry.get_sample_value("fulmen_algorithm_runs", {"state": "running"}) == 1
    one = {"project": "default", "run": "arithmetic-1", "state": "running"}
    assert registry.get_sample_value("fulmen_algorithm_run_state", one) == 1

    runs.move(NAME, RunState.SUCCEEDED)
    assert registry.get_sample_value("fulmen_algorithm_run_metric", labels) is None
    assert registry.get_sample_value("fulmen_algorithm_runs", {"state": "succeeded"}) == 1


def test_the_newest_metrics_survive_a_restart(runs, tmp_path):
    measure(runs, 1)
    again = RunRegistry(RunStorage(tmp_path), clock=now)
    again.restore(replace(RUN, state=RunState.RUNNING), RunFiles(tmp_path / "runs/default/arithmetic-1"))

    assert again.entry(NAME).events.latest_metrics == {"reward_mean": 0.1, "loss": -1.0}
