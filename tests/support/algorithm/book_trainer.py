"""A trainer without torch, whose weights are the list of the rows it was trained on."""

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.ports import Notify
from fulmen_algorithm.training.rows import NO_VERSION, Row
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings, WeightsKind
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_algorithm.weights.tensor_files import WEIGHTS_FILE, Weights, bytes_tensor, read_folder, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOOK = "book"


class BookTrainer:
    """The port `Trainer`: one line for each row that was trained on."""

    def __init__(self) -> None:
        self.book: list[dict[str, Any]] = []

    @classmethod
    async def open(cls, setup: TrainerSetup, notify: Notify) -> Trainer:
        return cls()

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Raises: a book has no tokenizer."""
        raise NotImplementedError("books have no tokenizer")

    async def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Notes rollout, step and age of each row."""
        for row in rows:
            oldest = min(version for version in row.policy_versions if version != NO_VERSION)
            self.book.append({"rollout": row.rollout_id, "step": current_version + 1, "age": current_version - oldest})
        return [StepResult(loss=0.0, grad_norm=1.0, skipped=not rows, learning_rate=0.1, seconds=0.0, metrics={})]

    async def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Raises: no run of these tests calls it."""
        raise NotImplementedError

    async def logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Raises: no run of these tests calls it."""
        raise NotImplementedError

    async def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Raises: no run of these tests calls it."""
        raise NotImplementedError

    async def reward_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Raises: no run of these tests calls it."""
        raise NotImplementedError

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        weights = write_book(folder, self.book)
        size = weights.size_bytes
        return WrittenWeights(kind=WeightsKind.FULL, sha256=weights.sha256(), size_bytes=size, full_bytes=size)

    async def copy_weights(self, order: WeightsOrder) -> Callable[[Path], Awaitable[WrittenWeights]]:
        return partial(self._copy().write_weights, order=order)

    async def copy_state(self) -> Callable[[Path], Awaitable[None]]:
        return self._copy().write_state

    def _copy(self) -> "BookTrainer":
        copy = BookTrainer()
        copy.book = [*self.book]
        return copy

    async def write_state(self, folder: Path) -> None:
        write_book(folder / "model", self.book)

    async def read_state(self, folder: Path) -> None:
        self.book = read_book(folder / "model")

    async def close(self) -> None:
        """Holds nothing."""


def write_book(folder: Path, book: list[dict[str, Any]]) -> Weights:
    """Writes the weights of a version: the bytes of the book are a tensor."""
    weights = Weights(tensors={BOOK: bytes_tensor(np.frombuffer(json.dumps(book).encode(), dtype=np.uint8))})
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS_FILE, weights.tensors, {"format": "pt"})
    return weights


def read_book(folder: Path) -> list[dict[str, Any]]:
    book: list[dict[str, Any]] = json.loads(read_folder(folder).tensors[BOOK].words.tobytes())
    return book
