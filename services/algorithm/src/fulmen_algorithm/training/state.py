"""The state of training, between steps and within one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fulmen_algorithm.training.critic import Critic
from fulmen_algorithm.training.optimizer import LearningRate, NormWatch
from fulmen_algorithm.training.optimizers import make_optimizer
from fulmen_algorithm.training.parallel import AllReduce, GradientReducer
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.settings import OptimizerSettings, StepResult


@dataclass(slots=True, kw_only=True)
class BatchProgress:
    """How far a batch is trained: what other ranks need to continue with it, besides the training state.

    Attributes:
        proximal: Log-probabilities at the start of the batch, by row; None if they are not needed.
        mismatch: Metrics of the whole batch.
        results: Those of the steps so far.
    """

    proximal: list[list[float]] | None = None
    mismatch: dict[str, float] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart:
    """What a step changes before it is decided whether it is taken, as it was at its start.

    Attributes:
        generators: Random generators.
        exchange: State of the exchange of gradients.
    """

    generators: Mapping[str, Any]
    exchange: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """The mutable state of training: policy, optimiser, schedule and counters.

    Attributes:
        batch: Progress of the newest batch.
        step_start: Set during a step, if other ranks may be lost in it.
    """

    policy: PolicyModel
    optimizer: torch.optim.Optimizer
    rate: LearningRate
    reducer: GradientReducer = field(default_factory=AllReduce)
    optimizer_steps: int = 0
    skipped_steps: int = 0
    norms: NormWatch = field(default_factory=NormWatch)
    critic: Critic | None = None
    batch: BatchProgress | None = None
    step_start: StepStart | None = None

    @property
    def tried_steps(self) -> int:
        """Optimiser steps that were taken or skipped."""
        return self.optimizer_steps + self.skipped_steps


def make_state(policy: PolicyModel, settings: OptimizerSettings) -> TrainingState:
    """Builds a fresh training state around a policy.

    Raises:
        ValueError: if a schedule that decays lacks `total_steps`.
    """
    return TrainingState(
        policy=policy, optimizer=make_optimizer(policy.model, settings), rate=LearningRate(settings=settings)
    )
