"""A trainer in this process: a `LocalTrainer` in the service's torch thread."""

import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.trainers.torch_thread import TorchThread
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_exchange.ranks import Ranks


class InProcessTrainer:
    """See `domain.trainer.Trainer`."""

    def __init__(self, trainer: LocalTrainer, thread: TorchThread) -> None:
        self._trainer = trainer
        self._thread = thread

    @classmethod
    async def open(cls, setup: TrainerSetup, *, thread: TorchThread, device: str) -> "InProcessTrainer":
        """Loads the model and builds a fresh optimiser.

        Raises:
            RunFailed: if the folder holds no model with tokenizer.
        """
        return cls(await thread.run(LocalTrainer.open, setup, Ranks(device=torch.device(device))), thread)

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

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes the present weights for engines."""
        written = await self._thread.run(self._trainer.write_weights, folder, order)
        assert written is not None  # a group of one leads itself
        return written

    async def write_state(self, folder: Path) -> None:
        """Writes the complete training state."""
        await self._thread.run(self._trainer.write_state, folder)

    async def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`."""
        await self._thread.run(self._trainer.read_state, folder)

    async def close(self) -> None:
        """Releases the memory after the current call and before the next trainer opens; waits for neither."""
        del self._trainer
        self._thread.soon(_free)


def _free() -> None:
    # Modules are cycles of few objects and much memory, which the collector would not come to for long.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
