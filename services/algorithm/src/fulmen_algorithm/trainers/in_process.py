"""A trainer in this process: a `LocalTrainer` in the service's torch thread."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.trainers.devices import Devices
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_exchange.ranks import Ranks

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TorchThread:
    """The one thread for all torch work of the service, done in order without blocking the event loop."""

    def __init__(self, *, torch_threads: int) -> None:
        """Starts no thread yet; `torch_threads` is the number of threads within one operation of torch."""
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="torch", initializer=torch.set_num_threads, initargs=(torch_threads,)
        )

    async def run(
        self, work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Runs a function in the thread; it completes even if the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(work, *args, **kwargs))

    def soon(self, work: Callable[[], None]) -> None:
        """Runs a function in the thread without waiting for it."""
        self._executor.submit(work)

    def close(self) -> None:
        """Waits for the current call and drops queued ones."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class InProcessTrainer:
    """See `policy.trainer.Trainer`."""

    def __init__(self, trainer: LocalTrainer, thread: TorchThread) -> None:
        self._trainer = trainer
        self._thread = thread

    @classmethod
    async def open(cls, setup: TrainerSetup, *, thread: TorchThread, device: str) -> "InProcessTrainer":
        """Loads the models, on `device` or on the GPUs that a plan has named, and builds a fresh optimiser.

        Raises:
            RunFailed: if the folder holds no model with tokenizer.
        """
        devices = Devices.of_service(setup.compute.parallel, device)
        ranks = Ranks(device=torch.device(devices.policy))
        return cls(await thread.run(LocalTrainer.open, setup, ranks, devices), thread)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._trainer.tokenizer

    async def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step."""
        return await self._thread.run(
            self._trainer.train, rows, settings=settings, batch=batch, seed=seed, current_version=current_version
        )

    async def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step."""
        return await self._thread.run(self._trainer.train_supervised, rows, settings=settings)

    async def logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the log-probability of each token that trains."""
        return await self._thread.run(self._trainer.logprobs, rows, settings=settings)

    async def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the frozen reference."""
        return await self._thread.run(self._trainer.reference_logprobs, rows, settings=settings)

    async def reward_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the reward model."""
        return await self._thread.run(self._trainer.reward_logprobs, rows, settings=settings)

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes the present weights for engines."""
        written = await self._thread.run(self._trainer.write_weights, folder, order)
        assert written is not None  # rank 0 of a group of one
        return written

    async def copy_weights(self, order: WeightsOrder) -> Callable[[Path], Awaitable[WrittenWeights]]:
        """See `policy.trainer.WritesBehind`."""
        write = await self._thread.run(self._trainer.copy_weights, order)
        return lambda folder: asyncio.to_thread(write, folder)

    async def copy_state(self) -> Callable[[Path], Awaitable[None]]:
        """See `policy.trainer.WritesBehind`."""
        write = await self._thread.run(self._trainer.copy_state)
        return lambda folder: asyncio.to_thread(write, folder)

    async def write_state(self, folder: Path) -> None:
        """Writes the complete training state."""
        await self._thread.run(self._trainer.write_state, folder)

    async def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`."""
        await self._thread.run(self._trainer.read_state, folder)

    async def close(self) -> None:
        """Schedules the release of memory after the current call, before the next trainer opens, without waiting."""
        del self._trainer
        self._thread.soon(free_memory)


def free_memory() -> None:
    """Frees what is no longer referenced.

    Modules are cycles of few objects but much memory, so the collector would be slow to reach them.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
