"""The run's book: progress, checkpoints, figures and time; nothing else changes them.

Invariant: `progress` is what the weights were made with. Both change in `commit` and nowhere else, and a checkpoint
holds both; so a crash, a pause or a stop at any wait loses work but never agreement.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pydantic import TypeAdapter

from fulmen_algorithm.domain.control import RunControl
from fulmen_algorithm.domain.events import EventLog, StepMetrics
from fulmen_algorithm.domain.ports import RunStorage
from fulmen_algorithm.domain.progress import Consumed, Progress, committed
from fulmen_algorithm.domain.torch_thread import TorchThread
from fulmen_algorithm.training.checkpoints import CheckpointStore, restore
from fulmen_algorithm.training.step import TrainingState

_PROGRESS = TypeAdapter(Progress)
RunUpdate = Callable[[Mapping[str, object]], None]


class Recorder:
    """Keeps the book of one run while it runs."""

    def __init__(
        self,
        *,
        storage: RunStorage,
        checkpoints: CheckpointStore,
        events: EventLog,
        control: RunControl,
        torch_thread: TorchThread,
        update_run: RunUpdate,
        steps: int,
        checkpoint_every: int,
    ) -> None:
        self.progress = Progress()
        self._storage = storage
        self._checkpoints = checkpoints
        self._events = events
        self._control = control
        self._torch = torch_thread
        self._update_run = update_run
        self._steps = steps
        self._every = checkpoint_every
        self._saved: Progress | None = None
        self._state: TrainingState | None = None
        self._first: tuple[int, float] | None = None

    async def recover(self, state: TrainingState) -> bool:
        """Puts the newest checkpoint into the state and takes back what came after it.

        Returns:
            Whether there was one; without, the first checkpoint is written, so that the run's beginning is pinned.
        """
        self._state = state
        search = await self._torch.run(self._checkpoints.newest)
        for damage in search.damaged:
            self._events.notify("warning", f"Checkpoint {damage.path.name} is damaged and was passed over.")
        if search.checkpoint is None:
            self._storage.truncate_consumed(0)
            await self.checkpoint()
            return False
        await self._torch.run(restore, search.checkpoint, state)
        self.progress = _PROGRESS.validate_python(dict(search.checkpoint.progress))
        self._storage.truncate_consumed(self.progress.consumed_bytes)
        self._saved = self.progress
        self._events.notify("info", f"Goes on from the checkpoint of step {self.progress.step}.")
        return True

    def commit(self, consumed: Sequence[Consumed] = ()) -> None:
        """Notes that a step is trained; call it right after the weights have changed, with no wait in between."""
        step = self.progress.step + 1
        size = self.progress.consumed_bytes
        if consumed:
            size = self._storage.append_consumed([c.record(step) for c in consumed])
        self.progress = committed(self.progress, step=step, consumed=consumed, consumed_bytes=size)

    def published(self, version: int) -> None:
        """Notes the version of the present weights."""
        self.progress = replace(self.progress, policy_version=version)

    def validated(self) -> None:
        """Notes that the present step is validated."""
        self.progress = replace(self.progress, validated_step=self.progress.step)

    def result(self, **figures: float) -> None:
        """Keeps figures of the run."""
        self.progress = replace(self.progress, results={**self.progress.results, **figures})
        self._update_run({"results": self.progress.results})

    def note(self, name: str, note: Mapping[str, object]) -> None:
        """Keeps a note for the report."""
        self._storage.save_note(name, note)

    def spend(self, kind: str, seconds: float) -> None:
        """Books wall time."""
        spent = {**self.progress.spent_s, kind: self.progress.spent_s.get(kind, 0.0) + seconds}
        self.progress = replace(self.progress, spent_s=spent)

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Books the wall time of its body."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spend(kind, time.monotonic() - started)

    async def end_step(self, values: Mapping[str, float]) -> None:
        """Announces the figures of the present step, writes a checkpoint if it is time, and listens for a stop.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        step = self.progress.step
        spent = {f"spent_{kind}_seconds": seconds for kind, seconds in self.progress.spent_s.items()}
        self._events.step_done(StepMetrics(step=step, values={**values, **spent, "eta_seconds": self._eta_s()}))
        await self.end_quiet_step()

    async def end_quiet_step(self) -> None:
        """Does the same without announcing anything.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        step = self.progress.step
        self._update_run({"step": step})
        if step == self._steps or (step and step % self._every == 0):
            await self.checkpoint()
        self._control.check()

    async def checkpoint(self) -> None:
        """Writes a checkpoint, unless nothing has changed since the last one."""
        if self._state is None or self.progress == self._saved:
            return
        progress = _PROGRESS.dump_python(self.progress, mode="json")
        await self._torch.run(self._checkpoints.save, self._state, progress)
        self._saved = self.progress

    def _eta_s(self) -> float:
        """Estimates the rest from the steps since the first report of this process; 0 while there is nothing to go by."""
        step, now = self.progress.step, time.monotonic()
        if self._first is None:
            self._first = (step, now)
        done = step - self._first[0]
        return (now - self._first[1]) / done * (self._steps - step) if done else 0.0
