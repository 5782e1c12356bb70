"""The weights of policy versions, for clients that download them: found by their resource, rebuilt where they are deltas."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from fulmen.errors import ModelNotFound, WeightsUnavailable
from fulmen_algorithm.persistence.model_folders import ModelFolders
from fulmen_algorithm.persistence.object_mirror import ObjectMirror
from fulmen_algorithm.persistence.run_files import RUNS_PLACE
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.policy.stored_weights import read_description, stored_policy
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink, PublishedPolicy, ResourceStore
from fulmen_algorithm.training.settings import WeightsKind

_KEPT: Final = 4


class WeightForm(StrEnum):
    """Which weights of a version are meant, as in `fulmen.algorithm.v1.WeightForm`."""

    TRAINED = "UNSPECIFIED"
    FULL = "FULL"
    ADAPTERS = "ADAPTERS"
    DELTA = "DELTA"
    BASE = "BASE"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFolder:
    """The weights of a version.

    Attributes:
        name: `resources/policy.{policy}/versions/{n}`.
        folder: Where they are.
        training_run: The run that published it; empty if none did.
    """

    name: str
    folder: Path
    training_run: str


class VersionWeights:
    """Finds the weights of versions."""

    def __init__(
        self,
        *,
        resources: Callable[[str], ResourceStore],
        storage: RunStorage,
        roots: ModelRoots,
        rebuilt: Path,
    ) -> None:
        """Creates no folder yet.

        Args:
            resources: Returns the resources of a project.
            storage: Where the runs are.
            roots: Folders that versions may name.
            rebuilt: Folder for weights that are rebuilt from deltas; the newest few are kept.
        """
        self._resources = resources
        self._storage = storage
        self._roots = roots
        self._rebuilt = rebuilt
        self._rebuilding = asyncio.Lock()

    async def find(self, project: str, version: str, form: WeightForm) -> VersionFolder:
        """Returns the folder of a version's weights.

        Raises:
            ResourceNotFound: if there is no such version.
            ModelNotFound: if its weights no longer exist or cannot be read.
            WeightsUnavailable: if it does not have weights of this form.
        """
        resources = self._resources(project)
        content = await resources.get(version)
        folders = _Folders(project, self._storage.folder, self._storage.mirror, self._rebuild)
        try:
            published = await stored_policy(content, resources=resources, files=folders, roots=self._roots)
            folder = await self._of_form(published, form)
        except RunFailed as error:
            raise ModelNotFound(f"The weights of {content.name} cannot be read: {error}", model=content.name) from error
        training_run = str(read_description(content).get("run", ""))
        return VersionFolder(name=content.name, folder=folder, training_run=training_run)

    async def _of_form(self, published: PublishedPolicy, form: WeightForm) -> Path:
        is_lora = published.kind is WeightsKind.LORA
        if is_lora and form in (WeightForm.TRAINED, WeightForm.ADAPTERS):
            return published.path
        if form is WeightForm.BASE and published.base_model is not None:
            return published.base_model
        if form is WeightForm.DELTA and published.kind is WeightsKind.DELTA:
            return published.path
        if form in (WeightForm.BASE, WeightForm.DELTA):
            text = "has no adapters" if form is WeightForm.BASE else "was not published as a difference"
        elif is_lora and published.rebuild is None:
            text = "consists of adapters without merged weights; the last version of a run with one adapter has merged weights"
        elif form is WeightForm.ADAPTERS:
            text = "has full weights and no base of adapters"
        else:
            return await published.model_folder()
        raise WeightsUnavailable(f"{published.name} {text}.", policy_version=published.name)

    async def _rebuild(self, project: str, chain: Sequence[ChainLink], step: int) -> Path:
        """Rebuilds weights once for all callers, and drops the oldest."""
        folder = self._rebuilt / project.rpartition("/")[2]
        async with self._rebuilding:
            path = await ModelFolders(folder).rebuild(chain, step)
            await asyncio.to_thread(self._forget, path)
        return path

    def _forget(self, newest: Path) -> None:
        newest.touch()
        found = [path for path in self._rebuilt.glob("*/*") if not path.name.startswith(".")]
        for path in sorted(found, key=lambda each: each.stat().st_mtime)[:-_KEPT]:
            aside = path.with_name(f".removed-{path.name}")
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Folders:
    """See `stored_weights.WeightFolders`."""

    project: str
    runs: Path
    mirror: ObjectMirror | None
    rebuild: Callable[[str, Sequence[ChainLink], int], Awaitable[Path]]

    def path_of(self, place: str) -> Path:
        return self.runs / place.removeprefix(RUNS_PLACE) if place.startswith(RUNS_PLACE) else Path(place)

    async def fetched(self, path: Path) -> Path:
        if self.mirror is not None and not path.exists() and path.is_relative_to(self.runs):
            await self.mirror.fetch(self.runs.joinpath(*path.relative_to(self.runs).parts[:2]), path)
        return path

    async def rebuild_model(self, chain: Sequence[ChainLink], step: int) -> Path:
        for link in chain:
            await self.fetched(link.path)
        return await self.rebuild(self.project, chain, step)
