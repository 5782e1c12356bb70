"""Weights & Biases, configured by its own variables (`WANDB_API_KEY`, `WANDB_MODE`, ...)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.run import RunState, TrainingRun


class WandbSink:
    """One W&B run for each training run, with its id; a restarted service continues the same one."""

    def __init__(self, run: TrainingRun, folder: Path, settings: Mapping[str, Any]) -> None:
        """Raises the errors of `wandb.init`, for example without a key or a network."""
        self._run = wandb.init(
            project=run.project.removeprefix("projects/"),
            id=run.run_id,
            name=run.display_name or run.run_id,
            group=run.policy.name,
            config={"algorithm": run.algorithm, **settings},
            dir=str(folder),
            resume="allow",
            # Several runs may be open in one process.
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own counter only grows, so steps repeated after a crash need a separate axis.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, steps: list[StepMetrics]) -> None:
        """Logs metrics by training step."""
        for step in steps:
            self._run.log({**step.values, "step": step.step})

    def close(self, run: TrainingRun) -> None:
        """Sends buffered metrics."""
        self._run.summary.update({f"result/{name}": value for name, value in run.results.items()})
        self._run.finish(exit_code=1 if run.state is RunState.FAILED else 0)
