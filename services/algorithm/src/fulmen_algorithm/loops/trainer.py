"""One trainer: its calls one after the other, each carried out once, and its state saved.

Invariants: a call that was carried out and not saved is lost only with the process, and then every caller that has seen its
answer is told so by the sequence. A caller that leaves does not stop its call, whose answer is kept for the next try.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fulmen.errors import ModelNotFound, QuotaExceeded, TrainerLost, TrainerNotFound, TrainerSequenceInvalid
from fulmen_algorithm.loops.calls import Open, Opened, WriteState, absolute
from fulmen_algorithm.loops.files import TrainerFiles, storage_errors
from fulmen_algorithm.loops.processes import LoopProcess
from fulmen_algorithm.loops.record import Progress, TrainerRecord
from fulmen_algorithm.runs import failure

MAX_WAITING = 16
"""Maximum number of calls of a trainer that wait for each other."""
RETRY_S = 1.0
Result = TypeVar("Result")


class Places(Protocol):
    """The processes."""

    async def place(self, record: TrainerRecord) -> LoopProcess:
        """Returns the process for a trainer, in which it then has a place."""

    async def leave(self, process: LoopProcess, trainer: str) -> None:
        """Gives the place up."""


Change = Callable[[LoopProcess, Progress], Awaitable[tuple[Progress, bytes]]]
"""Carries out a call; returns the progress after it, without sequence and digest, and the answer."""


class LoopTrainer:
    """A trainer. Thread: the event loop."""

    def __init__(self, record: TrainerRecord, files: TrainerFiles, places: Places) -> None:
        """Loads nothing yet; reads its progress."""
        self.record = record
        self.files = files
        self.used_s = files.used_s
        self.deleted = False
        self._places = places
        self._process: LoopProcess | None = None
        _, self.saved = files.saved()
        self.progress = self.saved
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def name(self) -> str:
        """`projects/{project}/trainers/{id}`."""
        return self.record.name

    @property
    def loaded(self) -> bool:
        """Whether its weights are in memory."""
        return self._process is not None and not self._process.lost

    @property
    def process_id(self) -> int | None:
        """Id of the process that has its weights; None if none has."""
        return self._process.pid if self._process is not None and self.loaded else None

    @property
    def busy(self) -> bool:
        """Whether a call is carried out or waits."""
        return self._waiting > 0

    async def load(self) -> None:
        """Loads it.

        Raises:
            RunFailed: if its weights cannot be loaded.
        """
        await self._alone(self._loaded)

    async def change(self, sequence: int, request: bytes, change: Change) -> bytes:
        """Carries out a call that changes the trainer, once, and returns its answer.

        Args:
            sequence: Number of the call.
            request: The request, to recognize a repeated one.
            change: Carries it out.

        Raises:
            TrainerSequenceInvalid: if the number is not the next one, and not that of an equal last call.
            TrainerLost: if the process has ended; the call was not carried out.
        """
        return await self._alone(lambda: self._changed(sequence, hashlib.sha256(request).hexdigest(), change))

    async def read(
        self, after: int | None, work: Callable[[LoopProcess], Awaitable[Result]], *, saved: bool = False
    ) -> Result:
        """Carries out a call that changes nothing; if asked to, saves the state first.

        Raises:
            TrainerSequenceInvalid: if the last call that changed the trainer is another one than `after`.
        """

        async def reading() -> Result:
            process = await self._found()
            self._check_after(after)
            if saved:
                await self._save()
            return await work(process)

        return await self._alone(reading)

    async def save(
        self, after: int | None, *, checkpoint: str = "", unload: bool = False, internal: bool = False
    ) -> None:
        """Saves the state; also under a name, if one is given; removes the trainer from memory if asked to.

        The service's own calls are `internal`: they wait however many others do.
        """

        async def saving() -> None:
            if self.progress != self.saved or checkpoint:
                await self._found()
            self._check_after(after)
            await self._save(even_unchanged=bool(checkpoint) and self.files.saved()[0] is None)
            if checkpoint:
                with storage_errors():
                    await asyncio.to_thread(self.files.keep, checkpoint)
            if unload:
                await self._unload()

        await self._alone(saving, is_bounded=not internal)

    async def unload(self) -> None:
        """Saves the state, and removes the trainer from memory."""
        if self.loaded:
            await self.save(None, unload=True, internal=True)

    async def delete(self) -> None:
        """Removes the trainer after the present call, without saving."""

        async def deleting() -> None:
            self.deleted = True
            await self._unload()
            await asyncio.to_thread(self.files.delete)

        with suppress(TrainerNotFound):  # another call has deleted it
            await self._alone(deleting, is_bounded=False)

    def update(self, **changes: Any) -> None:
        """Changes fields of the record."""
        record = replace(self.record, **changes)
        self.files.save(record)
        self.record = record

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, Result]], *, is_bounded: bool = True) -> Result:
        """Carries out one call at a time; a call continues if the caller disconnects."""
        if is_bounded and self._waiting >= MAX_WAITING:
            raise QuotaExceeded(
                f"{MAX_WAITING} calls of the trainer are already waiting. Retry after the delay.",
                quota="trainer_calls",
                retry_after_s=RETRY_S,
            )

        async def in_turn() -> Result:
            try:
                async with self._turn:
                    if self.deleted:
                        raise unknown_trainer(self.name)
                    return await self._carried_out(work)
            finally:
                self._waiting -= 1

        self._waiting += 1
        task = asyncio.create_task(in_turn(), name=f"trainer {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # No one else reads its error.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _carried_out(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        try:
            with storage_errors():
                result = await work()
        except failure.TrainerLost as error:
            await self._forget()
            raise TrainerLost(
                f"{error.message} It may have run out of memory. The trainer continues at optimizer step {self.progress.step} "
                f"with call {self.progress.sequence + 1}.",
                trainer=self.name,
                sequence=self.progress.sequence,
                step=self.progress.step,
            ) from error
        finally:
            self.used_s = time.time()
            with suppress(OSError):  # it may be deleted, and the storage may be full
                self.files.touch()
        return result

    async def _changed(self, sequence: int, digest: str, change: Change) -> bytes:
        process, progress = await self._found(), self.progress
        if sequence == progress.sequence and sequence and digest == progress.digest:
            # Its answer was lost on the way.
            await self._autosave()
            return progress.answer
        if sequence != progress.sequence + 1:
            raise self._out_of_step(f"The call has the number {sequence}")
        after, answer = await change(process, progress)
        self.progress = replace(after, sequence=sequence, digest=digest, answer=answer)
        await self._autosave()
        return answer

    def _check_after(self, after: int | None) -> None:
        if after is not None and after != self.progress.sequence:
            raise self._out_of_step(f"The caller assumes call {after} as the last one")

    def _out_of_step(self, text: str) -> TrainerSequenceInvalid:
        at = self.progress
        return TrainerSequenceInvalid(
            f"{text}, but the trainer is at optimizer step {at.step} after call {at.sequence}. Later calls were lost with "
            f"its process, or another caller trains it. Continue with call {at.sequence + 1}.",
            trainer=self.name,
            sequence=at.sequence,
            step=at.step,
        )

    async def _loaded(self) -> LoopProcess:
        """Returns the process that has the weights; loads them if need be."""
        if self._process is not None and self._process.lost:
            await self._forget()
        if self._process is None:
            state, progress = await asyncio.to_thread(self.files.whole)
            process = await self._places.place(self.record)
            lora = b"" if self.record.lora is None else self.record.lora.model_dump_json().encode()
            folder = "" if state is None else absolute(state)
            call = Open(trainer=self.name, model=self.record.base, lora=lora, seed=self.record.seed, state=folder)
            try:
                opened = await process.ask(call, Opened)
            except BaseException:
                await self._places.leave(process, self.name)
                raise
            self._process, self.progress, self.saved = process, progress, progress
            self.record = replace(self.record, max_tokens=opened.max_tokens, vocabulary=opened.vocabulary)
        return self._process

    async def _found(self) -> LoopProcess:
        """Returns the process; see `_loaded`.

        Raises:
            ModelNotFound: if the initial weights no longer exist.
        """
        try:
            return await self._loaded()
        except failure.RunFailed as error:
            raise ModelNotFound(f"The trainer cannot be loaded: {error.message}", model=self.record.base) from error

    async def _autosave(self) -> None:
        every, at = self.record.autosave_steps, self.progress
        # A skipped step counts where every step does.
        due = every == 1 or at.step - self.saved.step >= every
        if every and due and not at.weight_sum:
            await self._save()

    async def _save(self, *, even_unchanged: bool = False) -> None:
        if self._process is None or (self.progress == self.saved and not even_unchanged):
            return
        folder = await asyncio.to_thread(self.files.begin)
        await self._process.ask(WriteState(trainer=self.name, folder=absolute(folder)), object)
        await asyncio.to_thread(self.files.complete, folder, self.progress)
        self.saved = self.progress

    async def _unload(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await self._places.leave(process, self.name)

    async def _forget(self) -> None:
        """Returns to the last saved state, after the process has ended."""
        await self._unload()
        self.progress = self.saved


def unknown_trainer(name: str) -> TrainerNotFound:
    """Returns the error for a name of no trainer; also for one of another project, which must look the same."""
    return TrainerNotFound("The trainer does not exist.", trainer=name[:200])
