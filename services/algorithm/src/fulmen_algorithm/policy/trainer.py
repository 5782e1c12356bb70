"""The trainer of one run's weights: in this process or in a group of ranks, behind one interface.

Rows, settings and metrics are plain values, so that the service itself never loads torch.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

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
        reference_dir: Frozen reference policy of a KL penalty; None without a penalty.
        critic: How a critic makes the advantages; None where the rows have them.
        lora: Fresh adapters are trained beside the weights in `model_dir`; None: the weights themselves.
        exchange: How the ranks of `compute` exchange gradients; None: as they are.
        training_run: Whose trainer it is, `trainingRuns/{id}`.
        project: Of the run, `projects/{id}`.
        server_access: To servers of shards; None where the exchange has none.
    """

    model_dir: Path
    optimizer: OptimizerSettings
    seed: int
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    reference_dir: Path | None = None
    critic: CriticPlan | None = None
    lora: LoraSettings | None = None
    exchange: ExchangeSettings | None = None
    training_run: str = ""
    project: str = ""
    server_access: ServerAccess | None = None


class Trainer(Protocol):
    """The weights of one run and their optimiser. One call at a time; a call is never stopped in the middle.

    Every call raises `TrainerLost` if what trains has ended or does not answer: all that it held is lost then, and the
    run resumes with another trainer from its newest checkpoint.
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
        """Computes the log-probability of each token that trains, 0.0 for the others; see `training.step.logprobs_of`."""

    async def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the frozen reference; only where the setup named one."""

    async def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes the present weights for engines: whole, as what changed, or their adapters; see `WeightsOrder`."""

    async def write_state(self, folder: Path) -> None:
        """Writes the complete training state, including the model folder `model`."""

    async def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`, bit for bit."""

    async def close(self) -> None:
        """Releases all resources; the trainer is not used afterwards."""


OpenTrainer = Callable[[TrainerSetup], Awaitable[Trainer]]
"""Opens a trainer. Raises `RunFailed` if the folder holds no model with tokenizer."""
