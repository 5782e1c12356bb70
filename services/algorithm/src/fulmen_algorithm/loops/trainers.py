"""All trainers of the service, and the background role that unloads idle ones and deletes unused ones.

A trainer belongs to the service in whose state folder it is.
"""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from fulmen.errors import FulmenError, QuotaExceeded, SettingsInvalid, TrainerExists, Violation
from fulmen.ids import uuid7
from fulmen_algorithm.loops.files import TrainerFiles, storage_errors, stored
from fulmen_algorithm.loops.processes import LoopProcess, LoopProcesses
from fulmen_algorithm.loops.publication import Publisher
from fulmen_algorithm.loops.record import TrainerDraft, TrainerRecord
from fulmen_algorithm.loops.rules import CHECKPOINT
from fulmen_algorithm.loops.trainer import LoopTrainer, unknown_trainer
from fulmen_algorithm.policy.first_weights import WeightSources, first_weights
from fulmen_algorithm.runs.failure import RunFailed, TrainerLost
from fulmen_algorithm.runs.run import PolicyOrigin

SWEEP_INTERVAL_S = 5.0
DRAIN_LIMIT_S = 60.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLimits:
    """Limits.

    Attributes:
        max_trainers: Trainers of a project.
        max_checkpoints: Named checkpoints of a trainer.
        max_bytes: Size of a project's states and checkpoints above which none is added, in bytes.
        idle_s: Time without calls after which a trainer is saved and unloaded.
        keep_s: Time without calls after which it is deleted.
    """

    max_trainers: int
    max_checkpoints: int
    max_bytes: int
    idle_s: float
    keep_s: float


class Trainers:
    """The trainers."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: TrainerLimits,
        processes: LoopProcesses,
        publisher: Publisher,
        sources: Callable[[str], WeightSources],
    ) -> None:
        """Reads the stored trainers; `sources` returns where a project's weights are found."""
        self.limits = limits
        self.publisher = publisher
        self.sources = sources
        self._folder = folder
        self._processes = processes
        self._creating: dict[str, asyncio.Task[LoopTrainer]] = {}
        self._trainers = {record.name: LoopTrainer(record, files, self) for record, files in stored(folder)}

    def find(self, name: str) -> LoopTrainer:
        """Returns a trainer.

        Raises:
            TrainerNotFound: if there is none.
        """
        found = self._trainers.get(name)
        if found is None or found.deleted:
            raise unknown_trainer(name)
        return found

    def newest_first(self, project: str) -> list[LoopTrainer]:
        """Lists the trainers of a project."""
        found = [each for each in self._trainers.values() if each.record.project == project and not each.deleted]
        return sorted(found, key=lambda each: (each.record.created_s, each.name), reverse=True)

    def using(self, folder: Path) -> str:
        """Returns the trainer that began with a folder of weights, which it needs to be loaded again; empty if none did."""
        return next((each.name for each in self._trainers.values() if Path(each.record.base) == folder), "")

    async def check_room(self, project: str) -> None:
        """Checks that a project may add a checkpoint.

        Raises:
            QuotaExceeded: if its trainers have too many bytes.
        """
        files = [each.files for each in self.newest_first(project)]
        held = await asyncio.to_thread(lambda: sum(each.size_bytes() for each in files))
        if held > self.limits.max_bytes:
            raise QuotaExceeded(
                f"The trainers of {project} have {held} bytes, more than the maximum (max_trainer_bytes). Delete trainers that are "
                "not needed.",
                project=project,
                quota="trainer_bytes",
            )

    async def create(self, draft: TrainerDraft) -> LoopTrainer:
        """Creates and loads a trainer, or returns the one that an equal request has created.

        Raises:
            SettingsInvalid: if its weights cannot be loaded, or have no layers for its adapters.
            TrainerExists: if the request id was used for another one.
            QuotaExceeded: if the project has too many.
        """
        for each in self._trainers.values():
            record = each.record
            if draft.request_id and (record.project, record.request_id) == (draft.project, draft.request_id):
                _check_same(record.name, record.request_digest, draft)
                return each
        key = f"{draft.project} {draft.request_id or uuid7()}"
        if key not in self._creating:
            self._check_count(draft.project)
            task = asyncio.create_task(self._create(draft), name=f"create trainer {draft.digest}")
            self._creating[key] = task
            task.add_done_callback(lambda done: self._created(key, done))
        elif self._creating[key].get_name() != f"create trainer {draft.digest}":
            _check_same("", "", draft)
        # It continues if the caller disconnects, and the caller can repeat the request.
        return await asyncio.shield(self._creating[key])

    async def delete(self, name: str) -> None:
        """Deletes a trainer."""
        trainer = self._trainers.get(name)
        if trainer is not None:
            await trainer.delete()
            self._trainers.pop(name, None)
            if not trainer.record.published:
                await asyncio.to_thread(shutil.rmtree, self.publisher.files(name).folder, ignore_errors=True)

    async def place(self, record: TrainerRecord) -> LoopProcess:
        """Returns the process for a trainer; see `trainer.Places`."""
        # Not shared by projects: a call that lacks memory ends the process for all of its trainers.
        key = record.name if record.lora is None else f"{record.project} {record.base}"
        return await self._processes.place(key, record.name, make_room=self._make_room)

    async def leave(self, process: LoopProcess, trainer: str) -> None:
        """Gives a place up; see `trainer.Places`."""
        try:
            await self._processes.leave(process, trainer)
        except TrainerLost:
            await self._processes.leave(process, trainer)

    async def run(self) -> None:
        """Unloads and deletes trainers until cancelled."""
        while True:
            await asyncio.sleep(min(SWEEP_INTERVAL_S, self.limits.idle_s))
            for trainer in list(self._trainers.values()):
                idle_s = time.time() - trainer.used_s
                if trainer.busy:
                    continue
                try:
                    if idle_s > self.limits.keep_s:
                        _log.info("trainer_deleted_unused", trainer=trainer.name)
                        await self.delete(trainer.name)
                    elif trainer.loaded and idle_s > self.limits.idle_s:
                        await trainer.unload()
                except FulmenError as error:
                    _log.warning("trainer_not_swept", trainer=trainer.name, reason=error.message)
                except OSError as error:
                    _log.warning("trainer_not_swept", trainer=trainer.name, reason=error.strerror)

    async def drain(self) -> None:
        """Saves and unloads all trainers, after their present calls."""
        loaded = [each for each in self._trainers.values() if each.loaded]
        saving = [asyncio.create_task(each.unload(), name=f"drain {each.name}") for each in loaded]
        if saving:
            done, late = await asyncio.wait(saving, timeout=DRAIN_LIMIT_S)
            for task in late:
                task.cancel()
            failed = [task for task in done if task.exception() is not None]
            if late or failed:
                _log.warning("trainers_not_saved", late=len(late), failed=len(failed))

    def _check_count(self, project: str) -> None:
        count = sum(each.record.project == project for each in self._trainers.values())
        count += sum(key.startswith(f"{project} ") for key in self._creating)
        if count >= self.limits.max_trainers:
            raise QuotaExceeded(
                f"{project} has {count} trainers, which is the maximum (max_trainers). Delete trainers that are not needed.",
                project=project,
                quota="trainers",
            )

    async def _create(self, draft: TrainerDraft) -> LoopTrainer:
        await self.check_room(draft.project)
        name = f"{draft.project}/trainers/{uuid7()}"
        files = TrainerFiles(self._folder / draft.project.rpartition("/")[2] / name.rpartition("/")[2])
        weights = self.publisher.files(name)
        trainer: LoopTrainer | None = None
        try:
            with storage_errors():
                source = self._source(draft.checkpoint)
                record = await self._record(name, draft, source)
                await asyncio.to_thread(files.save, record)
                if source is not None:
                    checkpoint = draft.checkpoint.rpartition("/")[2]
                    state = await asyncio.to_thread(source.files.checkpoint, checkpoint)
                    await asyncio.to_thread(files.begin_with, state)
                trainer = LoopTrainer(record, files, self)
                await trainer.load()
                files.save(trainer.record)
        except BaseException as error:
            if trainer is not None:
                await trainer.delete()
            await asyncio.to_thread(shutil.rmtree, files.folder, ignore_errors=True)
            await asyncio.to_thread(shutil.rmtree, weights.folder, ignore_errors=True)
            if isinstance(error, RunFailed):
                field = "lora.targets" if error.message.startswith("lora.targets") else "policy"
                violation = Violation(field=field, description=error.message)
                raise SettingsInvalid("The trainer is not valid.", violations=[violation]) from error
            raise
        self._trainers[name] = trainer
        return trainer

    def _source(self, checkpoint: str) -> LoopTrainer | None:
        match = CHECKPOINT.fullmatch(checkpoint)
        return None if match is None else self.find(match[1])

    async def _record(self, name: str, draft: TrainerDraft, source: LoopTrainer | None) -> TrainerRecord:
        files = self.publisher.files(name)
        policy, lora = draft.policy, draft.lora
        if source is not None:
            policy, lora = (
                replace(source.record.policy, name=policy.name or source.record.policy.name),
                source.record.lora,
            )
            base = Path(source.record.base)
        else:
            sources = self.sources(draft.project)
            if policy.origin is PolicyOrigin.NEWEST:
                newest = await sources.resources.get(f"resources/policy.{policy.name}")
                policy = replace(policy, origin=PolicyOrigin.VERSION, source=newest.name)
            base = await first_weights(policy, files=files, sources=sources)
        if policy.origin is PolicyOrigin.VERSION:
            # Its run removes the weights of older versions.
            base = await asyncio.to_thread(files.keep_reference, base)
        autosave = (1 if lora is not None else 0) if draft.autosave_steps is None else draft.autosave_steps
        return TrainerRecord(
            name=name,
            policy=policy,
            base=str(base),
            lora=lora,
            adam=draft.adam,
            seed=draft.seed,
            autosave_steps=autosave,
            created_s=time.time(),
            request_id=draft.request_id,
            request_digest=draft.digest,
        )

    def _created(self, key: str, done: "asyncio.Task[LoopTrainer]") -> None:
        del self._creating[key]
        if not done.cancelled():
            done.exception()  # its caller may have left

    async def _make_room(self) -> bool:
        """Unloads the trainers of the process that was used least recently."""
        by_process: dict[int, list[LoopTrainer]] = {}
        for each in self._trainers.values():
            if each.process_id is not None:
                by_process.setdefault(each.process_id, []).append(each)
        held = Counter(each.record.project for each in self._trainers.values() if each.loaded)
        idle = [group for group in by_process.values() if not any(each.busy for each in group)]
        if not idle:
            return False
        # Of the project with the most loaded trainers first.
        chosen = min(idle, key=lambda group: (-held[group[0].record.project], max(each.used_s for each in group)))
        for each in chosen:
            await each.unload()
        return True


def _check_same(name: str, digest: str, draft: TrainerDraft) -> None:
    if digest != draft.digest:
        raise TrainerExists("The request id was used for another trainer. Use another one.", trainer=name)
