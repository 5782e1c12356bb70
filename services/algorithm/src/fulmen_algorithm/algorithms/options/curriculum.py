"""Chooses the task of each training group: by a seeded order, or by the difficulty that finished groups have shown.

The task of a group is a function of its index, the seed and the difficulties as of the last committed step, which are in
`progress.memory`. So a run that resumes knows them, and submits the groups that are missing as it would have.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fulmen_algorithm.algorithms.options.curriculum_settings import CurriculumSettings, DifficultyCurriculum
from fulmen_algorithm.algorithms.sampling import task_index
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.runs.context import RunContext

MEMORY = "curriculum"
BEFORE = -1
"""Epoch of what an earlier run has found."""
MAX_DOUBLINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """What the newest group of a task has shown.

    Attributes:
        success: Sum of the successes of its rollouts.
        rollouts: Number of its rollouts with a reward.
        streak: Groups of the task in a row that were solved.
        rests_until: First epoch in which the task is due again.
    """

    success: float
    rollouts: int
    streak: int = 0
    rests_until: int = 0

    @property
    def learnability(self) -> float:
        """p (1 - p) of the success p, by the rule of succession: also a task that never succeeded may be tried again."""
        p = (self.success + 1) / (self.rollouts + 2)
        return p * (1 - p)

    def after(self, successes: Sequence[float], *, epoch: int, rest: int) -> "Difficulty":
        """Returns the difficulty after another group, with its rollouts' successes."""
        if min(successes) < 1:
            return Difficulty(success=sum(successes), rollouts=len(successes))
        pause = min(2 ** min(self.streak, MAX_DOUBLINGS), rest)
        return Difficulty(
            success=sum(successes),
            rollouts=len(successes),
            streak=self.streak + 1,
            rests_until=epoch + 1 + pause,
        )


NEW = Difficulty(success=0.0, rollouts=0)


@dataclass(slots=True, kw_only=True)
class Curriculum:
    """The difficulties of a data set's tasks, by index, and the choice that follows from them.

    Attributes:
        tasks: The data set. Equal tasks have one difficulty, that of the first of them.
        settings: The rules.
        seed: Seed of the order and of draws.
        known: Difficulty of the tasks that were tried.
    """

    tasks: Sequence[bytes]
    settings: DifficultyCurriculum
    seed: int
    known: dict[int, Difficulty] = field(default_factory=dict)
    _first: dict[bytes, int] = field(init=False)

    def __post_init__(self) -> None:
        """Finds equal tasks."""
        self._first = {task: index for index, task in reversed(list(enumerate(self.tasks)))}

    def choose(self, index: int) -> int:
        """Returns the index of the task of the training group `index`."""
        epoch = index // len(self.tasks)
        own = self._first[self.tasks[task_index(index, len(self.tasks), self.seed)]]
        difficulty = self.known.get(own)
        if difficulty is None:
            return own
        chance = random.Random(f"{self.seed}/{MEMORY}/{index}")
        if epoch >= difficulty.rests_until and chance.random() >= self.settings.retry:
            return own
        all_tasks = ((task, self.known.get(task, NEW)) for task in sorted(self._first.values()))
        due = {task: each.learnability for task, each in all_tasks if epoch >= each.rests_until}
        return chance.choices(list(due), weights=list(due.values()))[0] if due else own

    def learn(self, task: bytes, rewards: Iterable[float], *, epoch: int) -> None:
        """Records the rewards of a finished group; a group without rewards, or of another task, is ignored."""
        index, successes = self._first.get(task), [self.settings.success(reward) for reward in rewards]
        if index is not None and successes:
            self.known[index] = self.known.get(index, NEW).after(successes, epoch=epoch, rest=self.settings.rest)

    def metrics(self, epoch: int) -> dict[str, float]:
        """Returns the shares of tasks that were tried, and that rest, and the mean success of those that were tried."""
        total, known = len(set(self._first.values())), self.known.values()
        tried = [each.success / each.rollouts for each in known]
        return {
            "curriculum_tried_share": len(tried) / total,
            "curriculum_resting_share": sum(each.rests_until > epoch for each in known) / total,
            "curriculum_success_mean": sum(tried) / len(tried) if tried else 0.0,
        }

    def dumped(self) -> dict[str, list[float]]:
        """Returns the difficulties as JSON."""
        return {str(k): [d.success, d.rollouts, d.streak, d.rests_until] for k, d in sorted(self.known.items())}

    def load(self, dumped: dict[str, list[float]]) -> None:
        """Reads the difficulties from JSON."""
        self.known = {
            int(task): Difficulty(success=success, rollouts=int(rollouts), streak=int(streak), rests_until=int(until))
            for task, (success, rollouts, streak, until) in dumped.items()
        }


class TaskOrder:
    """The order of a run's tasks, for its algorithm."""

    def __init__(
        self,
        ctx: RunContext,
        settings: CurriculumSettings,
        *,
        seed: int,
        reward_of: Callable[[FinishedRollout], float | None],
    ) -> None:
        """Initializes the order.

        Args:
            ctx: The run.
            settings: The curriculum.
            seed: Seed of the order.
            reward_of: Returns the reward of a rollout, as it trains; None if it has none.
        """
        self._ctx = ctx
        self._seed = seed
        self._reward_of = reward_of
        self._curriculum: Curriculum | None = None
        if isinstance(settings, DifficultyCurriculum):
            self._curriculum = Curriculum(tasks=ctx.inputs.train_tasks, settings=settings, seed=seed)

    async def begin(self) -> None:
        """Reads what is known of the tasks: of this run, or of an earlier one that the settings name.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        curriculum, memory = self._curriculum, self._ctx.progress.memory
        if curriculum is None:
            return
        if MEMORY in memory:
            curriculum.load(memory[MEMORY])
        elif curriculum.settings.run:
            name = f"{self._ctx.run.project}/trainingRuns/{curriculum.settings.run}"
            for group in await self._ctx.rollouts.of_run(name):
                self._learn(curriculum, group, epoch=BEFORE)
            share = len(curriculum.known) / len(curriculum.tasks)
            self._ctx.notify("info", f"The rollouts of {curriculum.settings.run} cover {share:.0%} of the tasks.")
            self._ctx.recorder.remember(**{MEMORY: curriculum.dumped()})

    async def submit_next(self, *, size: int, count: int) -> None:
        """Submits the next training groups.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        tasks = self._ctx.inputs.train_tasks
        chosen = [tasks[self._choose(index)] for index in self._ctx.rollouts.upcoming(count)]
        await self._ctx.rollouts.submit(*chosen, size=size)

    def learn(self, groups: Iterable[FinishedGroup]) -> dict[str, float]:
        """Takes in the groups of a step that was committed; returns metrics."""
        curriculum = self._curriculum
        if curriculum is None:
            return {}
        for group in groups:
            self._learn(curriculum, group, epoch=group.index // len(curriculum.tasks))
        self._ctx.recorder.remember(**{MEMORY: curriculum.dumped()})
        return curriculum.metrics(self._ctx.rollouts.next_index // len(curriculum.tasks))

    def _choose(self, index: int) -> int:
        if self._curriculum is not None:
            return self._curriculum.choose(index)
        return task_index(index, len(self._ctx.inputs.train_tasks), self._seed)

    def _learn(self, curriculum: Curriculum, group: FinishedGroup, *, epoch: int) -> None:
        rewards = [reward for each in group.rollouts if (reward := self._reward_of(each)) is not None]
        curriculum.learn(group.rollouts[0].task if group.rollouts else b"", rewards, epoch=epoch)
