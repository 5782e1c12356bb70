"""Event files for `tensorboard --logdir`, in the folder `tensorboard` of each run."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.run import TrainingRun

FOLDER = "tensorboard"


class TensorBoardSink:
    """Writes scalars named as in the run's metrics."""

    def __init__(self, run: TrainingRun, folder: Path, settings: Mapping[str, Any]) -> None:
        """Opens a new file next to the files of earlier processes."""
        self._writer = EventFileWriter(str(folder / FOLDER))
        self._last: int | None = None

    def write(self, steps: list[StepMetrics]) -> None:
        """Writes metrics; a repeated step purges the points from it on."""
        now = time.time()
        for step in steps:
            if self._last is None or step.step < self._last:
                session = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=now, step=step.step, session_log=session))
            self._last = step.step
            values = [Summary.Value(tag=name, simple_value=value) for name, value in step.values.items()]
            self._writer.add_event(Event(wall_time=now, step=step.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, run: TrainingRun) -> None:
        """Closes the file."""
        self._writer.close()
