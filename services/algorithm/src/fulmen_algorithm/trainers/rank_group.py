"""A trainer in a group of processes, on this machine or several.

Every call is executed by all ranks together; the result is rank 0's. If a rank ends,
fails unexpectedly, misses the deadline or is on a silent machine, the whole group is ended and the call raises `TrainerLost`.
Invariant: ranks never outlive this process (each watches its connection), and never see the service's settings.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen_algorithm.cluster.port import Affinity, Resources, Wishes
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers.calls import OPEN, Answer, decode_result, encode_call
from fulmen_algorithm.trainers.files.folders import folders_of
from fulmen_algorithm.trainers.processes import Group, GroupOptions, RankEnded, RankRefused, start_group
from fulmen_algorithm.trainers.survivors import Asks, asks_of, hand_over
from fulmen_algorithm.training.compute import ComputeSettings, OneProcess, ParallelSettings
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODULE = "fulmen_algorithm.trainers.rank"
ERROR_GRACE_S = 30.0
"""Time for the other ranks to answer after one has refused a call, in seconds."""
LAST_WORDS_S = 1.0
"""Time to read the answer of a rank that has ended, in seconds."""


class RankGroupTrainer:
    """See `policy.trainer.Trainer`."""

    def __init__(self, group: Group, options: GroupOptions, parallel: ParallelSettings) -> None:
        """Use `open`."""
        self._group = group
        self._links = group.links
        self._parallel = parallel
        self._options = options
        self._lost = ""
        self._interrupted: tuple[str, Asks] | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    async def open(cls, setup: TrainerSetup, options: GroupOptions) -> "RankGroupTrainer":
        """Starts the ranks, which load the model and build a fresh optimiser.

        Raises:
            RunFailed: if the folder holds no model with tokenizer, the ranks do not fit the cluster, or its machines differ.
            TrainerLost: if the ranks do not start.
        """
        wishes = replace(
            wishes_of(setup.compute, options),
            folders=sorted(setup.folders),
            written=[setup.run_dir] if setup.run_dir is not None else [],
        )
        parallel = setup.compute.parallel
        trainer = cls(await start_group(MODULE, parallel.ranks, options, wishes), options, parallel)
        if setup.server_access is not None and setup.server_access.token_file:
            trainer._group.files.token_file = Path(setup.server_access.token_file)
        try:
            await trainer._call(OPEN, setup=setup)
            trainer._tokenizer = await asyncio.to_thread(_load_tokenizer, setup.model_dir)
        except BaseException:
            await trainer.close()
            raise
        return trainer

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        assert self._tokenizer is not None, "the trainer is open"
        return self._tokenizer

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(link.hello.pid for link in self._links)

    async def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step."""
        results: list[StepResult] = await self._call(
            "train", rows, settings=settings, batch=batch, seed=seed, current_version=current_version
        )
        return results

    async def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step."""
        result: StepResult = await self._call("train_supervised", rows, settings=settings)
        return result

    async def logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the log-probability of each token that trains."""
        found: list[list[float]] = await self._call("logprobs", rows, settings=settings)
        return found

    async def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the frozen reference."""
        found: list[list[float]] = await self._call("reference_logprobs", rows, settings=settings)
        return found

    async def reward_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the reward model."""
        found: list[list[float]] = await self._call("reward_logprobs", rows, settings=settings)
        return found

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes the present weights for engines."""
        written: WrittenWeights = await self._call("write_weights", folder=folder.resolve(), order=order)
        return written

    async def write_state(self, folder: Path) -> None:
        """Writes the complete training state."""
        await self._call("write_state", folder=folder.resolve())

    async def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`."""
        await self._call("read_state", folder=folder.resolve())

    async def hand_over(self, folder: Path) -> bool:
        """Has the ranks that are left after a loss write their state to an empty folder, and ends them.

        Returns:
            False if they do not: the state is lost.
        """
        interrupted, self._interrupted = self._interrupted, None
        if interrupted is None:
            return False
        method, asks = interrupted
        try:
            return await hand_over(
                self._group,
                asks,
                folder,
                ranks_per_copy=self._parallel.ranks_per_copy,
                with_batch=method in ("train", "train_supervised"),
            )
        finally:
            await _cancelled(asks)
            await self._group.end()

    @property
    def lost_nodes(self) -> set[str]:
        """Names of the machines that may be lost."""
        return {self._group.processes.members[rank].node for rank, whole in self._group.processes.lost.items() if whole}

    async def close(self) -> None:
        """Ends the ranks; idempotent."""
        self._lost = self._lost or "The trainer is closed."
        if self._interrupted is not None:
            await _cancelled(self._interrupted[1])
        await self._group.end()

    async def _call(self, method: str, rows: Sequence[Row] = (), **arguments: object) -> Any:
        if self._lost:
            raise TrainerLost(self._lost)
        call = await asyncio.to_thread(encode_call, method, rows, arguments)
        # A cancelled call leaves ranks in the middle of it, so the group cannot be used again.
        self._lost = "A call to the trainer was cancelled."
        self._group.files.offer(folders_of(method, arguments))
        asks = asks_of(self._links, call)
        try:
            async with asyncio.timeout(self._options.call_deadline_s):
                first = await self._ask_all(asks)
        except RankEnded as error:
            raise await self._lose(str(error), method, asks) from error
        except TimeoutError as error:
            text = f"The trainer did not answer within {self._options.call_deadline_s:.0f} s."
            raise await self._lose(text, method, asks) from error
        finally:
            self._group.files.offer()
            if self._interrupted is None:
                await _cancelled(asks)
        self._lost = ""
        return await asyncio.to_thread(decode_result, method, first.result) if first.result else None

    async def _ask_all(self, asks: Asks) -> Answer:
        """Waits for the answers of all ranks and returns the first rank's.

        Raises:
            RankEnded: if one of them ends or its machine is silent; the others may then block forever.
            ValueError, OSError, ...: the error of a rank; all are then ready for the next call.
        """
        answered = asyncio.create_task(self._answers(list(asks.values())), name="ranks-answer")
        lost = asyncio.create_task(self._group.lost(), name="group-ends")
        try:
            await asyncio.wait({answered, lost}, return_when=asyncio.FIRST_COMPLETED)
            # A rank may have reported why it ends, and its end may be why others fail.
            if not _says_why(answered):
                await asyncio.wait({answered, lost}, timeout=LAST_WORDS_S)
            if not _says_why(answered) and lost.done():
                raise lost.result()
            return answered.result()
        finally:
            for task in (answered, lost):
                task.cancel()
            await asyncio.wait({answered, lost})

    async def _answers(self, tasks: "Sequence[asyncio.Task[Answer]]") -> Answer:
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting and not _ended(tasks):
            await asyncio.wait(waiting, timeout=ERROR_GRACE_S)
        if ended := _ended(tasks):
            raise ended[0]
        if not all(task.done() for task in tasks):
            raise RankEnded("The ranks of the trainer do not agree on a call that one of them refused.")
        for task in tasks:
            if isinstance(refused := task.exception(), RankRefused):
                self._lost = ""
                raise refused.error
        return tasks[0].result()

    async def _lose(self, text: str, method: str, asks: Asks) -> TrainerLost:
        self._lost = text
        # A state that is being read is none.
        if self._parallel.is_elastic and method not in (OPEN, "read_state"):
            # The caller may let the remaining ones pass on their state.
            self._interrupted = method, asks
        else:
            await self._group.end()
        return TrainerLost(text)


def wishes_of(compute: ComputeSettings, options: GroupOptions) -> Wishes:
    """Returns how the ranks of a run are placed."""
    parallel = compute.parallel
    if isinstance(parallel, OneProcess):
        return Wishes()
    # That of the policy, and one of each model beside it that has its own.
    gpus = 1 + len(parallel.beside) if options.device.startswith("cuda") else 0
    each = Resources(cpus=parallel.cpus, gpus=gpus, memory_bytes=parallel.memory_gib * 2**30)
    return Wishes(each=each, affinity=Affinity(parallel.affinity))


def _says_why(answered: "asyncio.Task[Answer]") -> bool:
    """Returns whether there is an answer, or a reason why there is none."""
    if not answered.done():
        return False
    error = answered.exception()
    return not isinstance(error, RankEnded) or error.is_cause


async def _cancelled(asks: Asks) -> None:
    for task in asks.values():
        task.cancel()
    await asyncio.wait(asks.values())


def _ended(tasks: Sequence["asyncio.Task[Answer]"]) -> list[BaseException]:
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return [error for error in errors if error is not None and not isinstance(error, RankRefused)]


def _load_tokenizer(model_dir: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    return tokenizer
