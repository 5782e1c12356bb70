"""What an algorithm is, and what its settings have in common."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from fulmen_algorithm.domain.context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """What the store is asked to allow a rollout.

    Attributes:
        timeout_s: Limit of one attempt, in seconds.
        attempts: Attempts of one rollout, where the failure is not the agent's.
    """

    timeout_s: float = 120.0
    attempts: int = 8


class AlgorithmSettings(BaseModel):
    """Settings of an algorithm: unknown keys are errors, numbers are not read from text.

    Attributes:
        steps: Training steps of the run.
        seed: Seed of everything random in the run: tasks' order, shuffling, the model's build.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Decoupled weight decay.
        schedule: `constant`, `linear` or `cosine`, after the warm-up.
        warmup_steps: Optimiser steps of linear warm-up.
        max_grad_norm: Gradients are scaled down to this global norm.
        token_budget: Positions of a micro-batch; bounds memory, not the result.
        checkpoint_every: Steps between checkpoints; the last step always has one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    steps: int = Field(default=100, ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**31)
    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    schedule: str = Field(default="constant", pattern="^(constant|linear|cosine)$")
    warmup_steps: int = Field(default=0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    token_budget: int = Field(default=8192, ge=16, le=1_048_576)
    checkpoint_every: int = Field(default=10, ge=1)

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run, which is how long a schedule is."""
        return self.steps

    @property
    def rollout_limits(self) -> RolloutLimits:
        """Limits of the run's rollouts."""
        return RolloutLimits()


Settings = TypeVar("Settings", bound=AlgorithmSettings)


class Algorithm(Protocol):
    """One way to train. Everything that must survive a crash is in the context's progress, not in the object."""

    async def run(self, ctx: RunContext) -> None:
        """Goes on from `ctx.progress` to the end.

        Raises:
            Interrupted: if the run was asked to stop.
            RunFailed: if it cannot go on.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmEntry(Generic[Settings]):
    """An algorithm as the registry knows it.

    Attributes:
        settings: Its settings class.
        make: Builds it from its settings.
        needs: Inputs that a run must name.
        takes: Further inputs that a run may name.
    """

    settings: type[Settings]
    make: Callable[[Settings], Algorithm]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()


@lru_cache(maxsize=4)
def permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Returns the order of `count` items in an epoch: a function of its arguments, so that nothing need be kept."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


# The entries' settings differ; each entry is consistent in itself.
Registry = Mapping[str, AlgorithmEntry[Any]]
