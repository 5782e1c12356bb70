"""Rows, adapters and results of trainers as plain values."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.client.view import View
from fulmen.messages import moment

__all__ = ["BackwardResult", "Completion", "Lora", "OptimResult", "Row", "TrainerCheckpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A token sequence to train on. Lists other than `token_ids` are empty or have as many elements.

    Attributes:
        token_ids: Prompt and completion.
        weights: Weight of each token in the loss, 0 for tokens that are not trained on; empty means 1 for all tokens
            but the first.
        advantages: Advantage of each token, for losses other than `cross_entropy`.
        sampler_logprobs: Log-probability of each token when it was sampled, for losses other than `cross_entropy` and `reinforce`.
    """

    token_ids: Sequence[int]
    weights: Sequence[float] = ()
    advantages: Sequence[float] = ()
    sampler_logprobs: Sequence[float] = ()

    def message(self) -> pb.TrainingRow:
        """Returns the message of the contract."""
        return pb.TrainingRow(
            token_ids=self.token_ids,
            weights=self.weights,
            advantages=self.advantages,
            sampler_logprobs=self.sampler_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters, trained instead of all weights.

    Attributes:
        rank: Columns of the low-rank factors.
        alpha: The adapter's output is scaled by alpha / rank.
        dropout: Dropout of an adapter's inputs in training.
        targets: Names of the modules with an adapter; empty for all linear layers.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: Sequence[str] = ()

    def message(self) -> pb.TrainerLora:
        """Returns the message of the contract."""
        return pb.TrainerLora(rank=self.rank, alpha=self.alpha, dropout=self.dropout, targets=self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sampled completion.

    Attributes:
        prompt_ids: The prompt.
        token_ids: Sampled tokens, with the token that ends the turn if it was sampled.
        logprobs: Natural log-probability of each of these tokens.
        text: Text without special tokens.
        stopped: Whether it ended with a stop token, not by `max_tokens`.
    """

    prompt_ids: Sequence[int] = field(repr=False)
    token_ids: Sequence[int] = field(repr=False)
    logprobs: Sequence[float] = field(repr=False)
    text: str
    stopped: bool

    def row(self, advantage: float) -> Row:
        """Returns a row that trains the sampled tokens, all with the same advantage."""
        prompt, sampled = [0.0] * len(self.prompt_ids), len(self.token_ids)
        return Row(
            token_ids=[*self.prompt_ids, *self.token_ids],
            weights=[*prompt, *[1.0] * sampled],
            advantages=[*prompt, *[advantage] * sampled],
            sampler_logprobs=[*prompt, *self.logprobs],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardResult:
    """Results of `forward_backward`, for the weights before the next step.

    Attributes:
        loss: Mean over tokens, weighted.
        weight: Sum of the weights of all tokens.
        metrics: Metrics by name; docs/metrics.md explains them.
        logprobs: Log-probability of each token of each row; 0 for tokens without weight.
    """

    loss: float
    weight: float
    metrics: Mapping[str, float]
    logprobs: Sequence[Sequence[float]] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """Outcome of an optimizer step.

    Attributes:
        step: Optimizer steps taken.
        grad_norm: Norm of the gradient before it was scaled down.
        skipped: Whether the step was skipped because the gradient is not finite.
    """

    step: int
    grad_norm: float
    skipped: bool


class TrainerCheckpoint(View[pb.TrainerCheckpoint]):
    """A named checkpoint of a trainer."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name", "step")

    @property
    def name(self) -> str:
        """`projects/{project}/trainers/{trainer}/checkpoints/{checkpoint}`."""
        return str(self.proto.name)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.proto.step)

    @property
    def created(self) -> datetime.datetime | None:
        """When it was saved."""
        return moment(self.proto.create_time)
