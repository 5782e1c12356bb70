"""The trainer of one run's weights: in this process or in a group of ranks, behind one interface.

Rows, settings and metrics are plain values, so that the service itself never loads torch.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fulmen_algorithm.losses.advantage_settings import CriticPlan
from fulmen_algorithm.training.compute import ComputeSettings
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, LoraSettings, OptimizerSettings, StepResult, StepSettings
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_exchange.links.settings import ServerAccess
from fulmen_exchange.registry import ExchangeSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """Initial state and settings of a trainer.

    Attributes:
        model_dir: A folder in the format of `transformers`, with tokenizer.
        optimizer: Optimiser and schedule.
        seed: Seed of everything random in the trainer.
        compute: One process or a group of ranks, and the precision.
        run_dir: Folder of the run, which ranks on other machines must share; None if none has files there.
        reference_dir: Folder of the reference policy; None without a KL penalty.
        reward_dir: Folder of the reward model; None without one.
        critic: Critic that computes the advantages; None if the rows have them.
        lora: Adapters to train on top of `model_dir`; None to train the weights themselves.
        exchange: How the ranks exchange gradients; None for plain sums.
        training_run: The run, `projects/{project}/trainingRuns/{id}`.
        project: The run's project, `projects/{id}`.
        server_access: Access to the shards; None if the exchange has no shards.
    """

    model_dir: Path
    optimizer: OptimizerSettings
    seed: int
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    run_dir: Path | None = None
    reference_dir: Path | None = None
    reward_dir: Path | None = None
    critic: CriticPlan | None = None
    lora: LoraSettings | None = None
    exchange: ExchangeSettings | None = None
    training_run: str = ""
    project: str = ""
    server_access: ServerAccess | None = None

    @property
    def folders(self) -> frozenset[Path]:
        """Folders of the models that are loaded."""
        named = (self.model_dir, self.reference_dir, self.reward_dir)
        return frozenset(folder for folder in named if folder is not None)


class WeightsWriter(Protocol):
    """Writes weights for engines."""

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes the present weights for engines: complete, as a delta, or as adapters; see `WeightsOrder`."""


class Trainer(WeightsWriter, Protocol):
    """The weights of one run and their optimiser. One call at a time; calls are not interruptible.

    Every call raises `TrainerLost` if the trainer has exited or does not answer. Its state is then lost, and the run
    resumes from its newest checkpoint with a new trainer.
    """

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""

    async def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step; see `training.step.train_batch`."""

    async def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step; see `training.step.sft_step`."""

    async def logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes each trained token's log-probability, 0.0 for other tokens; see `training.step.logprobs_of`."""

    async def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the reference policy; requires `reference_dir`."""

    async def reward_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the reward model; requires `reward_dir`."""

    async def write_state(self, folder: Path) -> None:
        """Writes the complete training state, including the model folder `model`."""

    async def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`, bit for bit."""

    async def close(self) -> None:
        """Releases all resources; the trainer cannot be used afterwards."""


@runtime_checkable
class WritesBehind(Protocol):
    """A trainer that copies what is to be written, and trains on while the copy is written.

    Each result is called at most once, and may be called while the trainer does anything else. A copy of the weights is
    written before the next one is requested: it may be the base of its delta.
    """

    async def copy_weights(self, order: WeightsOrder) -> Callable[[Path], Awaitable[WrittenWeights]]:
        """Copies the present weights in the type of the order; returns what writes them as `write_weights` does."""

    async def copy_state(self) -> Callable[[Path], Awaitable[None]]:
        """Copies the training state; returns what writes it as `write_state` does."""
