"""A group of ranks whose number follows the available resources: it continues when ranks are lost, and grows again.

When ranks are lost, those that are left hand the state over to a new group, which is asked the interrupted call again. The
state has the optimiser steps that were taken of it, and they are not taken again. If no copy of the weights is left, the run
resumes from its newest checkpoint, as with any other trainer. Groups change between two calls only.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, TypeVar

from fulmen_algorithm.cluster.port import ClusterFailed
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed, TrainerLost
from fulmen_algorithm.runs.ports import Notify
from fulmen_algorithm.trainers.processes import GroupOptions, group_order
from fulmen_algorithm.trainers.rank_group import MODULE, RankGroupTrainer, wishes_of
from fulmen_algorithm.training.compute import ComputeSettings, OneProcess
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROW_EVERY_S = 300.0
"""Time between two checks for resources for more ranks; engines take minutes to notice that a machine is lost."""
MAX_LOST = 3
"""Groups that are lost in one call, or do not start for it, before the run resumes from its newest checkpoint."""
FOLDER = "hand-over-"
Result = TypeVar("Result")


async def ranks_with_room(compute: ComputeSettings, options: GroupOptions, *, without: Collection[str] = ()) -> int:
    """Returns the number of ranks with which a group can start now: whole copies, at least the minimum with which its
    run continues.

    Raises:
        ClusterFailed: if the cluster does not answer.
    """
    parallel = compute.parallel
    if isinstance(parallel, OneProcess) or parallel.min_ranks is None:
        return parallel.ranks
    order = group_order(MODULE, parallel.ranks, options, wishes_of(compute, options))
    room = await options.cluster.room(order, without=without)
    return max(parallel.min_ranks, room - room % parallel.ranks_per_copy)


def with_ranks(compute: ComputeSettings, ranks: int) -> ComputeSettings:
    """Returns the settings of a group of another number of ranks."""
    return compute.model_copy(update={"parallel": compute.parallel.model_copy(update={"ranks": ranks})})


class ElasticTrainer:
    """See `policy.trainer.Trainer`."""

    def __init__(self, setup: TrainerSetup, options: GroupOptions, notify: Notify) -> None:
        """Use `open`."""
        self._setup = setup
        self._options = options
        self._notify = notify
        self._group: RankGroupTrainer | None = None
        self._ranks = 0
        self._look_at_s = 0.0

    @classmethod
    async def open(cls, setup: TrainerSetup, options: GroupOptions, *, notify: Notify) -> "ElasticTrainer":
        """Starts as many ranks as there is room for.

        Raises:
            RunFailed: as `RankGroupTrainer.open`.
            TrainerLost: if the ranks do not start, or the cluster does not answer.
        """
        trainer = cls(setup, options, notify)
        await trainer._start(await trainer._room())
        if trainer._ranks < setup.compute.parallel.ranks:
            notify("warning", f"There are resources for fewer ranks: {trainer._shown}.")
        return trainer

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self._open_group.tokenizer

    @property
    def group(self) -> RankGroupTrainer:
        """The present group."""
        return self._open_group

    async def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step."""
        await self._grow()
        return await self._ask(
            lambda group: group.train(rows, settings=settings, batch=batch, seed=seed, current_version=current_version)
        )

    async def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step."""
        await self._grow()
        return await self._ask(lambda group: group.train_supervised(rows, settings=settings))

    async def logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the log-probability of each token that trains."""
        return await self._ask(lambda group: group.logprobs(rows, settings=settings))

    async def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the frozen reference."""
        return await self._ask(lambda group: group.reference_logprobs(rows, settings=settings))

    async def reward_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the reward model."""
        return await self._ask(lambda group: group.reward_logprobs(rows, settings=settings))

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes the present weights for engines."""
        return await self._ask(lambda group: group.write_weights(folder, order), written=folder)

    async def write_state(self, folder: Path) -> None:
        """Writes the complete training state."""
        await self._ask(lambda group: group.write_state(folder), written=folder)

    async def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`."""
        await self._open_group.read_state(folder)

    async def close(self) -> None:
        """Ends the ranks; idempotent."""
        if self._group is not None:
            await self._group.close()

    @property
    def _open_group(self) -> RankGroupTrainer:
        assert self._group is not None, "the trainer is open"
        return self._group

    @property
    def _fewest(self) -> int:
        parallel = self._setup.compute.parallel
        assert not isinstance(parallel, OneProcess), "its ranks are a group"
        return parallel.min_ranks or parallel.ranks

    @property
    def _shown(self) -> str:
        return f"continuing with {self._ranks} of {self._setup.compute.parallel.ranks} ranks"

    async def _ask(
        self, ask: Callable[[RankGroupTrainer], Awaitable[Result]], *, written: Path | None = None
    ) -> Result:
        """Asks the group; asks another one again if it is lost and hands its state over.

        Args:
            ask: The call.
            written: Folder that the call writes: empty or missing.

        Raises:
            TrainerLost: if the state is lost, or group after group.
        """
        was_there = written is not None and written.exists()
        lost = 1
        while True:
            try:
                return await ask(self._open_group)
            except TrainerLost as error:
                if lost == MAX_LOST or not await self._go_on(error):
                    raise
            lost += 1
            if written is not None:
                await asyncio.to_thread(shutil.rmtree, written, ignore_errors=True)
                if was_there:
                    written.mkdir()

    async def _go_on(self, error: TrainerLost) -> bool:
        """Starts a new group with the state of those that are left; returns False if it is lost."""
        group = self._open_group
        with self._new_folder() as folder:
            if not await group.hand_over(folder):
                return False
            await self._start_again(folder, without=group.lost_nodes)
            self._notify("warning", f"{error.message} No step is lost: {self._shown}.")
        return True

    async def _grow(self) -> None:
        """Looks for room at intervals; with room for more ranks, a larger group takes the state."""
        now_s = asyncio.get_running_loop().time()
        if self._ranks == self._setup.compute.parallel.ranks or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + GROW_EVERY_S
        before, room = self._ranks, 0
        with suppress(TrainerLost):
            room = await self._room()
        if room <= before:
            return
        with self._new_folder() as folder:
            await self._ask(lambda group: group.write_state(folder), written=folder)
            await self._start_again(folder)
        if self._ranks > before:
            self._notify("info", f"There are resources for more ranks: {self._shown}.")

    async def _start_again(self, folder: Path, *, without: Collection[str] = ()) -> None:
        """Starts a group with a state; if it does not start, one of the size before, or a smaller one.

        Raises:
            TrainerLost, RunFailed: if none starts.
        """
        ranks, each = await self._room(without), self._setup.compute.parallel.ranks_per_copy
        for tried in range(1, MAX_LOST + 1):
            try:
                await self._start(ranks)
                await self._open_group.read_state(folder)
            except (TrainerLost, RunFailed) as error:
                if tried == MAX_LOST:
                    raise
                self._notify("warning", f"A group of {ranks} ranks cannot be used. {error.message}")
                ranks = max(self._fewest, min(ranks - each, self._ranks))
            else:
                return

    async def _start(self, ranks: int) -> None:
        await self.close()
        setup = replace(self._setup, compute=with_ranks(self._setup.compute, ranks))
        self._group = await RankGroupTrainer.open(setup, self._options)
        self._ranks = ranks
        self._look_at_s = asyncio.get_running_loop().time() + GROW_EVERY_S

    async def _room(self, without: Collection[str] = ()) -> int:
        try:
            return await ranks_with_room(self._setup.compute, self._options, without=without)
        except ClusterFailed as error:
            raise TrainerLost(f"The cluster of the ranks does not answer: {error}.") from error

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """Makes a folder for a state that one group passes to the next; removes files that a service that died left
        there."""
        parent = self._setup.run_dir
        for old in () if parent is None else parent.glob(f"{FOLDER}*"):
            shutil.rmtree(old, ignore_errors=True)
        folder = Path(mkdtemp(prefix=FOLDER, dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
