"""The interface of a metric sink, and the available sinks."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.run import TrainingRun


class MetricSink(Protocol):
    """Receives the metrics of one run; its methods block and are called in a thread."""

    def write(self, steps: list[StepMetrics]) -> None:
        """Writes metrics in order; metrics of a repeated step are appended."""

    def close(self, run: TrainingRun) -> None:
        """Flushes buffers; `run` has its final state, or its present one when the service stops."""


class OpenSink(Protocol):
    """Opens the sink of a run."""

    def __call__(self, run: TrainingRun, folder: Path, settings: Mapping[str, Any]) -> MetricSink:
        """`folder` is the run's own, `settings` its settings; raises the library's errors."""


_SINKS = {
    "tensorboard": "fulmen_algorithm.sinks.tensorboard:TensorBoardSink",
    "wandb": "fulmen_algorithm.sinks.wandb:WandbSink",
    "mlflow": "fulmen_algorithm.sinks.mlflow:MlflowSink",
}
NAMES = tuple(_SINKS)


def load_sink(name: str) -> OpenSink:
    """Imports a sink by name, without the libraries of others.

    Raises:
        ImportError: if its library is not installed.
    """
    module, _, attribute = _SINKS[name].partition(":")
    opener: OpenSink = getattr(import_module(module), attribute)
    return opener
