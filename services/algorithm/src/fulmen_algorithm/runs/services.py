"""The parts of a run that its policy uses."""

from dataclasses import dataclass

from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.ports import Notify, ResourceStore, RunStorage, Serving
from fulmen_algorithm.runs.recorder import Recorder, RunUpdate
from fulmen_algorithm.runs.run import TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """The parts of a run that its policy uses.

    Attributes:
        run: The run as it was created.
        recorder: Progress of the run.
        control: Stop requests.
        resources: Resources of the run's project, where versions are published.
        storage: Files of the run: weights and notes.
        serving: Engine and route of the policy.
        notify: Appends a notice to the run's events.
        update_run: Updates public fields of the run.
    """

    run: TrainingRun
    recorder: Recorder
    control: RunControl
    resources: ResourceStore
    storage: RunStorage
    serving: Serving
    notify: Notify
    update_run: RunUpdate
