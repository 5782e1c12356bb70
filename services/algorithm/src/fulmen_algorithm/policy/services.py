"""The parts of a run that its policy uses."""

from dataclasses import dataclass

from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.ports import ResourceStore, Serving
from fulmen_algorithm.runs.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """The parts of a run that its policy uses.

    Attributes:
        entry: The run, its events and its files.
        recorder: Progress of the run.
        control: Stop requests.
        resources: Resources of the run's project, where versions are published.
        serving: Engine and route of the policy.
        beside: Engine and route of a past version of it, if one is served.
    """

    entry: Entry
    recorder: Recorder
    control: RunControl
    resources: ResourceStore
    serving: Serving
    beside: Serving
