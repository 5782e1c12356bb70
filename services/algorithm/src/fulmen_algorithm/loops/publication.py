"""Publishes the weights of a trainer as a version of its policy, like one of a training run."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fulmen_algorithm.loops.calls import WriteWeights, absolute
from fulmen_algorithm.loops.processes import LoopProcess
from fulmen_algorithm.loops.record import PublishedWeights, TrainerRecord
from fulmen_algorithm.loops.trainer import LoopTrainer
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.policy.versions import Versions
from fulmen_algorithm.runs.ports import ResourceStore
from fulmen_algorithm.runs.run import PolicyOrigin
from fulmen_algorithm.training.settings import FullWeights
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights

EPOCH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Writes the weights of one trainer."""

    process: LoopProcess
    trainer: str

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes the present weights for engines."""
        call = WriteWeights(trainer=self.trainer, folder=absolute(folder), order=order)
        return await self.process.ask(call, WrittenWeights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Publishes versions.

    Attributes:
        storage: Where runs are; each trainer has a folder there, which other services read as those of runs.
        resources: Returns the resources of a project.
        keep: Number of newest versions of a trainer whose weights are kept.
    """

    storage: RunStorage
    resources: Callable[[str], ResourceStore]
    keep: int

    def files(self, trainer: str) -> RunFiles:
        """Returns the folder of the weights of a trainer that others read."""
        project, _, id_ = trainer.removeprefix("projects/").partition("/trainers/")
        return RunFiles(self.storage.folder / project / f"trainer-{id_}", epoch=EPOCH, mirror=self.storage.mirror)

    async def publish(self, trainer: LoopTrainer, process: LoopProcess, *, alias: str) -> str:
        """Publishes the present weights; returns the name of the version.

        The same weights of the same call get the same version.
        """
        record, files = trainer.record, self.files(trainer.name)
        base = None if record.lora is None else await self._base(files, record)
        versions = Versions(
            files=files,
            trainer=_Writer(process=process, trainer=trainer.name),
            weights=FullWeights(),
            lora=record.lora,
            base_model=base,
        )
        at = trainer.progress
        saved = await versions.write(at.step, whole=True)
        request_id = f"{record.id}/{at.sequence}/{saved.sha256[:32]}"
        resources, resource = self.resources(record.project), f"resources/policy.{record.policy.name}"
        known = next((each for each in record.published if each.request_id == request_id), None)
        if known is None:
            parent = _parent(record)
            described = {**versions.describe(saved), "trainer": record.name, "step": at.step, "parent": parent}
            content = await resources.publish(
                resource=resource,
                kind="policy",
                content=json.dumps(described).encode(),
                content_type="application/json",
                parent=parent,
                request_id=request_id,
            )
            folders = tuple(str(folder) for folder in (saved.path, saved.merged) if folder is not None)
            known = PublishedWeights(name=content.name, number=content.version, request_id=request_id, folders=folders)
            kept = (*record.published, known)[-self.keep :]
            trainer.update(published=kept)
            await files.prune_models([Path(folder) for each in kept for folder in each.folders])
        if alias:
            await resources.point(resource, alias, known.number)
        return known.name

    async def _base(self, files: RunFiles, record: TrainerRecord) -> Path:
        """Returns a copy of the base that lasts as long as the versions do."""
        kept = await asyncio.to_thread(files.keep_reference, Path(record.base))
        await files.push_folder(kept)
        return kept


def _parent(record: TrainerRecord) -> str:
    if record.published:
        return record.published[-1].name
    return record.policy.source if record.policy.origin is PolicyOrigin.VERSION else ""
