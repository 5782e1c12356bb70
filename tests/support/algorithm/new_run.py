"""A run as it is when it was just created; without torch."""

from datetime import UTC, datetime
from typing import Any

from fulmen_algorithm.runs.run import PolicySpec, TrainingRun

__all__ = ["now", "training_run"]


def now() -> datetime:
    return datetime.now(UTC)


def training_run(**fields: Any) -> TrainingRun:
    """Returns a run, with some fields of one's own."""
    values: dict[str, Any] = {
        "name": "projects/default/trainingRuns/small",
        "display_name": "",
        "algorithm": "grpo",
        "settings_json": "{}",
        "policy": PolicySpec(name="tiny"),
        "inputs": {},
        "create_time": now(),
    }
    return TrainingRun(**(values | fields))
