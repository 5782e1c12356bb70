"""MLflow, configured by its own variables (`MLFLOW_TRACKING_URI`, ...)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunStatus
from mlflow.tracking import MlflowClient
from mlflow.utils.time import get_current_time_millis

from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.run import RunState, TrainingRun

TAG = "fulmen.training_run"
LONGEST_VALUE = 500
BATCH = 1000
"""Maximum number of metrics in one request."""


class MlflowSink:
    """One MLflow run for each training run, found again by a tag; experiments are named after policies."""

    def __init__(self, run: TrainingRun, folder: Path, settings: Mapping[str, Any]) -> None:
        """Raises MLflow's errors, for example if the server is unreachable."""
        self._client = MlflowClient()
        name = f"{run.project.removeprefix('projects/')}/{run.policy.name or run.algorithm}"
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([identity], f"tags.`{TAG}` = '{run.name}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            return
        title = run.display_name or run.run_id
        self._id = self._client.create_run(identity, tags={TAG: run.name}, run_name=title).info.run_id
        values = {"algorithm": run.algorithm, **settings}
        parameters = [Param(key, json.dumps(value)[:LONGEST_VALUE]) for key, value in values.items()]
        self._client.log_batch(self._id, params=parameters)

    def write(self, steps: list[StepMetrics]) -> None:
        """Logs metrics by training step."""
        now = get_current_time_millis()
        metrics = [Metric(name, value, now, step.step) for step in steps for name, value in step.values.items()]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + BATCH])

    def close(self, run: TrainingRun) -> None:
        """Sets the final status; a run that continues stays running."""
        if run.state.final:
            status = {RunState.SUCCEEDED: RunStatus.FINISHED, RunState.CANCELLED: RunStatus.KILLED}
            self._client.set_terminated(self._id, status=RunStatus.to_string(status.get(run.state, RunStatus.FAILED)))
