"""The only writer of a run's progress, checkpoints, metrics and time.

Invariant: `progress` describes the training of the weights. Both change in `commit` and nowhere else, and a checkpoint
holds both; so a crash, pause or stop may lose work but keeps them consistent.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from fulmen_algorithm.persistence.checkpoints import Checkpoint, CheckpointDamaged, CheckpointStore
from fulmen_algorithm.policy.trainer import Trainer, WritesBehind
from fulmen_algorithm.runs.behind import Behind
from fulmen_algorithm.runs.collapse import (
    GROUPS,
    REWARD,
    CollapseSettings,
    NoCollapse,
    NoticeCollapse,
    RewardCollapsed,
    RollbackOnCollapse,
    allowed_fall,
    best_of,
    fall,
    rewarded,
)
from fulmen_algorithm.runs.control import RunControl, StopReason
from fulmen_algorithm.runs.creation.starting_point import StartingPoint, branch_of
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.progress import Consumed, Outcome, Progress, committed
from fulmen_algorithm.runs.rewards import RewardDistribution, distribution

_PROGRESS = TypeAdapter(Progress)
SECTION_PREFIX = "section_"
"""Name of notes that are report sections, with a title and Markdown."""
Discard = Callable[[], Awaitable[None]]
CheckOwned = Callable[[], Awaitable[None]]
STEPS_LISTED = 100
REMEDY = (
    "Put the run back with `fulmen run rollback`, or start again with a lower learning_rate or with"
    ' collapse = { kind = "rollback" }. See docs/learning.md, What to look at when a run does not learn.'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderSettings:
    """Steps, checkpoints and reaction to a collapse.

    Attributes:
        steps: Steps of the run; 0 if its algorithm calls `plan`.
        checkpoint_every: Steps between checkpoints.
        collapse: Reaction to a collapsing reward.
        collapses: Number of earlier collapses.
        write_behind: Whether the training continues while checkpoints are written.
    """

    steps: int
    checkpoint_every: int
    collapse: CollapseSettings
    collapses: int
    write_behind: bool = False


class Recorder:
    """Records the progress, metrics and checkpoints of one run.

    Attributes:
        progress: Progress of the run.
        steps: Steps of the run; 0 until planned.
        behind: The checkpoint that is written behind the training.
    """

    def __init__(
        self,
        *,
        entry: Entry,
        checkpoints: CheckpointStore,
        control: RunControl,
        check_owned: CheckOwned,
        settings: RecorderSettings,
    ) -> None:
        """Initializes the recorder.

        Args:
            entry: The run, its events and its files.
            checkpoints: Its checkpoints.
            control: Its stop requests.
            check_owned: Raises RunLeaseLost if another service has taken the run over.
            settings: Steps, checkpoints and reaction to a collapse.
        """
        self.progress = Progress()
        self._entry = entry
        self._files = entry.files
        self._events = entry.events
        self._checkpoints = checkpoints
        self._control = control
        self._check_owned = check_owned
        self.steps = settings.steps
        self._every = settings.checkpoint_every
        self._collapse = settings.collapse
        self._collapses = settings.collapses
        self._writes_behind = settings.write_behind
        self.behind = Behind()
        self._saved: Progress | None = None
        self._trainer: Trainer | None = None
        self._branch_points: tuple[int, ...] = ()
        self._damaged: frozenset[Path] = frozenset()
        self._first: tuple[int, float] | None = None
        self._rewards: RewardDistribution | None = None

    async def recover(
        self,
        trainer: Trainer | None,
        start: StartingPoint,
        *,
        branch_points: Sequence[int] = (),
        discard: Discard | None = None,
    ) -> bool:
        """Restores a checkpoint and discards all later records.

        After a rollback, the first checkpoint of the new branch is written.

        Args:
            trainer: Trainer to restore; None for an algorithm that trains no weights.
            start: The checkpoint.
            branch_points: Sequences of the checkpoints to which the run was rolled back.
            discard: Cancels the rollouts of the abandoned branch.

        Returns:
            Whether a checkpoint was found; if not, an initial checkpoint is written.
        """
        self._trainer = trainer
        self._branch_points = tuple(branch_points)
        self._damaged = frozenset(damage.path for damage in start.damaged)
        for damage in start.damaged:
            self._events.notify("warning", f"Checkpoint {damage.path.name} is damaged and was skipped.")
        if start.checkpoint is None:
            self._files.truncate_consumed(0)
            await self.checkpoint()
            return False
        if start.begins_branch:
            await self._begin_branch(start.checkpoint, discard)
            return True
        if trainer is not None:
            await trainer.read_state(start.checkpoint.path)
        self.progress = _PROGRESS.validate_python(dict(start.checkpoint.progress))
        self._files.truncate_consumed(self.progress.consumed_bytes)
        self._saved = self.progress
        self._events.notify("info", f"Resuming from the checkpoint of step {self.progress.step}.")
        return True

    async def _begin_branch(self, checkpoint: Checkpoint, discard: Discard | None) -> None:
        """Rolls the run back; idempotent, so a kill at any point is safe."""
        branch = len(self._branch_points)
        if discard is not None:
            await discard()
        if self._trainer is not None:
            await self._trainer.read_state(checkpoint.path)
        progress = _PROGRESS.validate_python(dict(checkpoint.progress))
        self.progress = replace(progress, branch=branch, policy_version=0)
        discarded = self._files.set_aside_consumed(progress.consumed_bytes, branch)
        await self.checkpoint()
        trained = sum(record["outcome"] == Outcome.TRAINED for record in discarded)
        self._entry.update(results=progress.results)
        self._events.notify(
            "warning",
            f"Rolled back to checkpoint {checkpoint.sequence} (step {progress.step}). {len(discarded)} groups are discarded, "
            f"{trained} of which had been trained on; their prompts are sampled again.",
        )
        self.section(
            f"branch_{branch:04d}",
            title=f"Discarded by the rollback to step {progress.step}",
            markdown=_discarded_table(discarded),
        )

    def commit(self, consumed: Sequence[Consumed] = (), *, changed: bool = True) -> None:
        """Commits a training step; call it right after the weights have changed, without an await in between.

        Args:
            consumed: Groups that the step consumed, in feed order.
            changed: Whether an optimiser step was taken; if not, the published version still has the current weights.
        """
        step = self.progress.step + 1
        size = self.progress.consumed_bytes
        if consumed:
            size = self._files.append_consumed([c.record(branch=self.progress.branch, step=step) for c in consumed])
        self._rewards = distribution(
            r.reward for c in consumed for r in c.group.rollouts if r.succeeded and r.reward is not None
        )
        self.progress = committed(self.progress, step=step, consumed=consumed, consumed_bytes=size, changed=changed)

    def published(self, version: int) -> None:
        """Records the version of the present weights."""
        self.progress = replace(self.progress, policy_version=version, parent_version=version)

    def validated(self) -> None:
        """Marks the present step as validated."""
        self.progress = replace(self.progress, validated_step=self.progress.step)

    def remember(self, **values: Any) -> None:
        """Stores JSON-serialisable state of the algorithm in `progress.memory`, which is part of checkpoints."""
        self.progress = replace(self.progress, memory={**self.progress.memory, **values})

    def result(self, **metrics: float) -> None:
        """Stores metrics of the whole run."""
        self.progress = replace(self.progress, results={**self.progress.results, **metrics})
        self._entry.update(results=self.progress.results)

    def found_prompt(self, version: str) -> None:
        """Stores the version of the best prompt, with which later stages continue."""
        self._entry.update(prompt_version=version)

    def note(self, name: str, note: Mapping[str, object]) -> None:
        """Stores a note for the report."""
        self._files.save_note(name, note)

    def section(self, name: str, *, title: str, markdown: str) -> None:
        """Stores a section of the report, replacing an earlier one of the same name."""
        self.note(f"{SECTION_PREFIX}{name}", {"title": title, "markdown": markdown})

    def spend(self, kind: str, seconds: float) -> None:
        """Adds wall time to an activity."""
        spent = {**self.progress.spent_s, kind: self.progress.spent_s.get(kind, 0.0) + seconds}
        self.progress = replace(self.progress, spent_s=spent)

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Adds the wall time of its body to an activity."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spend(kind, time.monotonic() - started)

    async def end_step(self, values: Mapping[str, float]) -> None:
        """Emits the metrics of the present step, writes a checkpoint if one is due, and honours stop requests.

        Raises:
            Interrupted: if the run was asked to stop.
            RewardCollapsed: if the run is to resume from an earlier checkpoint.
            RunFailed: if the maximum number of rollbacks is exceeded.
        """
        step = self.progress.step
        if REWARD in values:
            self.progress = rewarded(self.progress, values, window=self._collapse.window)
        if self.progress.branch:
            values = {**values, "rollbacks": float(self.progress.branch)}
        spent = {f"spent_{kind}_seconds": seconds for kind, seconds in self.progress.spent_s.items()}
        measured = {**values, **spent, **self._eta()}
        self._events.step_done(StepMetrics(step=step, values=measured, rewards=self._rewards))
        self._rewards = None
        if not isinstance(self._collapse, NoCollapse) and REWARD in values:
            await self._watch_rewards(self._collapse, groups=values.get(GROUPS, 1.0))
        await self.end_quiet_step()

    async def _watch_rewards(self, settings: NoticeCollapse | RollbackOnCollapse, *, groups: float) -> None:
        fallen = fall(self.progress, window=settings.window)
        allowed = allowed_fall(self.progress, settings, groups=groups)
        if fallen <= allowed:
            # Again only after it has recovered: an average may go up and down around the limit.
            recovered = fallen <= allowed / 2
            self.progress = replace(self.progress, collapsed=self.progress.collapsed and not recovered)
            return
        text = (
            f"The reward collapsed: {fmean(self.progress.rewards):.4g} on average over {settings.window} steps, "
            f"after {self.progress.best_reward:.4g} at best."
        )
        if isinstance(settings, NoticeCollapse):
            if not self.progress.collapsed:
                self._events.notify("warning", f"{text} {REMEDY}")
            self.progress = replace(self.progress, collapsed=True)
            return
        if self._collapses >= settings.max_rollbacks:
            raise RunFailed(f"{text} The run was already rolled back {self._collapses} times (collapse.max_rollbacks).")
        best = await asyncio.to_thread(self._best_whole)
        if best is None:
            raise RunFailed(f"{text} There is no checkpoint to roll back to.")
        raise RewardCollapsed(text, sequence=best.sequence, step=int(best.progress["step"]))

    def _best_whole(self) -> Checkpoint | None:
        """Returns the best undamaged checkpoint of the present branch and its ancestors."""
        own = [each for each in self._checkpoints.listed() if self._own_past(each)]
        while (best := best_of(own, window=self._collapse.window)) is not None:
            try:
                return self._checkpoints.get(best.sequence)
            except CheckpointDamaged:
                own.remove(best)
        return None

    def _own_past(self, checkpoint: Checkpoint) -> bool:
        """Returns whether a checkpoint belongs to the present branch or its ancestors."""
        return all(checkpoint.sequence <= point for point in self._branch_points[branch_of(checkpoint) :])

    def plan(self, steps: int) -> None:
        """Sets the number of steps where it depends on the run's data."""
        self.steps = steps
        self._entry.update(step_count=steps)

    async def end_quiet_step(self) -> None:
        """Ends a step without emitting metrics.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        step = self.progress.step
        self.progress = replace(self.progress, ended=True)
        self._entry.update(step=step)
        if step == self.steps or (step and step % self._every == 0):
            with self.spending("checkpoint"):
                await self.checkpoint(behind=self._writes_behind and step != self.steps)
        self.pause_if_due()

    @property
    def pauses(self) -> bool:
        """Whether the run pauses after the present step, and so is to measure what it would measure at its end."""
        step, pause = self.progress.step, self._entry.run.pause_at_step
        return 0 < pause <= step and (step < self.steps or not self.steps)

    def pause_if_due(self) -> None:
        """Stops the run if it was asked to, or is to pause after the present step and has ended it.

        Raises:
            Interrupted: if so.
        """
        if self.pauses and self.progress.ended:
            self._control.request(StopReason.PAUSE)
        self._control.check()

    async def checkpoint(self, *, behind: bool = False) -> None:
        """Writes a checkpoint, unless only the time has changed since the last one.

        With `behind`, and a trainer that can, it returns once the state is copied. The copy is written while the caller
        continues; an error is raised by the next call.
        """
        await self.behind.done()
        if self._saved is not None and replace(self.progress, spent_s=self._saved.spent_s) == self._saved:
            return
        progress = self.progress
        trainer: object = self._trainer
        write = await trainer.copy_state() if behind and isinstance(trainer, WritesBehind) else None
        if write is not None:
            self.behind.start(self._write(progress, write), name=f"checkpoint {progress.step}")
        else:
            await self._write(progress, None if self._trainer is None else self._trainer.write_state)

    async def _write(self, progress: Progress, write: Callable[[Path], Awaitable[None]] | None) -> None:
        folder = await asyncio.to_thread(self._checkpoints.begin)
        if write is not None:
            await write(folder)
        keep = await asyncio.to_thread(self._kept)
        dumped = _PROGRESS.dump_python(progress, mode="json")
        await self._check_owned()
        await asyncio.to_thread(self._checkpoints.complete, folder, dumped, keep_also=keep)
        await self._files.push()
        self._saved = progress

    def _kept(self) -> set[int]:
        """Returns the checkpoints to be kept regardless of age, as rollback targets."""
        kept: set[int] = set()
        listed = self._checkpoints.listed()
        if self._collapse.kind != "none":
            best = best_of([each for each in listed if self._own_past(each)], window=self._collapse.window)
            kept |= {best.sequence} if best is not None else set()
        own = [e for e in listed if branch_of(e) == len(self._branch_points) and e.path not in self._damaged]
        # Including the one being written. Until there are enough, checkpoints of the abandoned branch are among the newest.
        if self._branch_points and len(own) + 1 < self._checkpoints.keep:
            kept.add(self._branch_points[-1])
        return kept

    def _eta(self) -> dict[str, float]:
        """Estimates the remaining time from the steps since this process's first report."""
        step, now = self.progress.step, time.monotonic()
        if self._first is None:
            self._first = (step, now)
        done = step - self._first[0]
        left = max(self.steps - step, 0)
        return {"eta_seconds": (now - self._first[1]) / done * left if done else 0.0} if done or not left else {}


def _discarded_table(records: Sequence[Mapping[str, object]]) -> str:
    """Formats the groups that are no longer in the weights, by step."""
    steps: dict[int, list[str]] = {}
    for record in records:
        steps.setdefault(int(str(record["step"])), []).append(f"{record['group']} ({record['outcome']})")
    rows = [f"| {step} | {', '.join(groups)} |" for step, groups in sorted(steps.items())]
    more = [f"| {len(rows) - STEPS_LISTED} more steps | |"] if len(rows) > STEPS_LISTED else []
    return "\n".join(["| step | groups |", "|---|---|", *rows[:STEPS_LISTED], *more])
