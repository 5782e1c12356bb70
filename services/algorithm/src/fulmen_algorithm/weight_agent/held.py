"""What this agent has of the run's versions, or is fetching."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from fulmen.algorithm.v1 import weight_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class _Key:
    policy_version: str
    form: int


class HeldVersions:
    """The folders of versions that this agent has, or is fetching. Used on one event loop."""

    def __init__(self) -> None:
        self._folders: dict[_Key, Path] = {}
        self._newest = 0
        self._changed = asyncio.Event()

    def begin(self, version: int, *, keep: list[Path]) -> None:
        """Records that a version was ordered; folders of earlier ones are deleted, except those to keep."""
        self._folders = {key: folder for key, folder in self._folders.items() if folder in keep}
        self._newest = max(self._newest, version)
        self.moved()

    def add(self, source: pb.WeightSource, folder: Path) -> None:
        """Adds the folder of a download, which may just begin."""
        self._folders[_Key(source.policy_version, source.form)] = folder
        self.moved()

    def remove(self, source: pb.WeightSource) -> None:
        """Removes a download that has failed."""
        self._folders.pop(_Key(source.policy_version, source.form), None)
        self.moved()

    def moved(self) -> None:
        """Wakes those who wait: more has arrived."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def change(self) -> asyncio.Event:
        """Is set at the next change."""
        return self._changed

    def folder(self, source: pb.WeightSource) -> Path | None:
        """Returns the folder of a download; None if there is none."""
        return self._folders.get(_Key(source.policy_version, source.form))

    def is_ahead(self, source: pb.WeightSource) -> bool:
        """Returns whether a version is newer than any that was ordered."""
        number = source.policy_version.rpartition("/")[2]
        return number.isdecimal() and int(number) > self._newest
