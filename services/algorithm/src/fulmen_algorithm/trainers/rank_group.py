"""A trainer in a group of processes on this machine.

Every call is executed by all ranks together; the result is rank 0's. If a rank ends,
fails unexpectedly or misses the deadline, the whole group is ended and the call raises `TrainerLost`.
Invariant: ranks never outlive this process (each watches its socket), and never see the service's settings.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers.calls import OPEN, Answer, decode_result, encode_call
from fulmen_algorithm.trainers.processes import Group, GroupOptions, Link, RankEnded, RankRefused, start_group
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODULE = "fulmen_algorithm.trainers.rank"
ERROR_GRACE_S = 30.0
"""Time for the other ranks to answer after one has refused a call, in seconds."""


class RankGroupTrainer:
    """See `policy.trainer.Trainer`."""

    def __init__(self, group: Group, links: Sequence[Link], options: GroupOptions) -> None:
        """Use `open`."""
        self._group = group
        self._links = sorted(links, key=lambda link: link.hello.rank)
        self._options = options
        self._lost = ""
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    async def open(cls, setup: TrainerSetup, options: GroupOptions) -> "RankGroupTrainer":
        """Starts the ranks, which load the model and build a fresh optimiser.

        Raises:
            RunFailed: if the folder holds no model with tokenizer, or the machine has fewer GPUs than ranks.
            TrainerLost: if the ranks do not start.
        """
        group, links = await start_group(MODULE, setup.compute.parallel.ranks, options)
        trainer = cls(group, links, options)
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

    async def close(self) -> None:
        """Ends the ranks; idempotent."""
        self._lost = self._lost or "The trainer is closed."
        await self._group.end(self._links)

    async def _call(self, method: str, rows: Sequence[Row] = (), **arguments: object) -> Any:
        if self._lost:
            raise TrainerLost(self._lost)
        call = await asyncio.to_thread(encode_call, method, rows, arguments)
        # A cancelled call leaves ranks in the middle of it, so the group cannot be used again.
        self._lost = "A call to the trainer was cancelled."
        try:
            async with asyncio.timeout(self._options.call_deadline_s):
                first = await self._ask_all(call)
        except RankEnded as error:
            raise await self._lose(str(error)) from error
        except TimeoutError as error:
            text = f"The trainer did not answer within {self._options.call_deadline_s:.0f} s."
            raise await self._lose(text) from error
        self._lost = ""
        return await asyncio.to_thread(decode_result, method, first.result) if first.result else None

    async def _ask_all(self, call: bytes) -> Answer:
        """Asks every rank and returns the answer of the first.

        Raises:
            RankEnded: if one of them ends; the others may then block forever.
            ValueError, OSError, ...: the error of a rank; all are then ready for the next call.
        """
        tasks = [asyncio.create_task(link.ask(call), name=f"rank-{link.hello.rank}") for link in self._links]
        try:
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
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _lose(self, text: str) -> TrainerLost:
        self._lost = text
        await self._group.end(self._links)
        return TrainerLost(text)


def _ended(tasks: Sequence["asyncio.Task[Answer]"]) -> list[BaseException]:
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return [error for error in errors if error is not None and not isinstance(error, RankRefused)]


def _load_tokenizer(model_dir: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    return tokenizer
