"""Which folders a call to a rank reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.trainers.standings import HandOver
from fulmen_algorithm.weights.publishing import WeightsOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFolders:
    """The folders of one call.

    Attributes:
        read: Those that it reads.
        written: Those that it writes; missing or empty before.
    """

    read: frozenset[Path] = frozenset()
    written: frozenset[Path] = frozenset()


def folders_of(method: str, arguments: Mapping[str, Any]) -> CallFolders:
    """Returns the folders in the arguments of a method of `Trainer`."""
    read, written = set[Path](), set[Path]()
    for name, value in arguments.items():
        match value:
            case TrainerSetup():
                read |= value.folders
            case WeightsOrder() if value.adapters:
                read.add(Path(value.adapters))
            case HandOver():
                written.add(value.folder)
            case Path() if name == "folder":
                (read if method == "read_state" else written).add(value)
    return CallFolders(read=frozenset(read), written=frozenset(written))


def moved(arguments: Mapping[str, Any], places: Mapping[Path, Path]) -> dict[str, Any]:
    """Returns the arguments of a call with other folders in place of some."""
    return {name: _moved(value, places) for name, value in arguments.items()}


def _moved(value: Any, places: Mapping[Path, Path]) -> Any:
    match value:
        case TrainerSetup():
            reference, reward = value.reference_dir, value.reward_dir
            return replace(
                value,
                model_dir=places.get(value.model_dir, value.model_dir),
                reference_dir=None if reference is None else places.get(reference, reference),
                reward_dir=None if reward is None else places.get(reward, reward),
            )
        case WeightsOrder() if value.adapters:
            return replace(value, adapters=str(places.get(Path(value.adapters), value.adapters)))
        case HandOver():
            return value.model_copy(update={"folder": places.get(value.folder, value.folder)})
        case Path():
            return places.get(value, value)
    return value
