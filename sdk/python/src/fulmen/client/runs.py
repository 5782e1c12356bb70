"""Steps, notices, checkpoints and states of training runs as records."""

from __future__ import annotations

import datetime
from typing import ClassVar, Final

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.client.view import View
from fulmen.messages import moment

__all__ = ["Checkpoint", "RunFailed", "Step"]

VALIDATION: Final = ("validation_accuracy", "validation_pass_at_1", "validation_loss")
"""The metrics that `Step.validation` looks for, in this order."""


class RunFailed(Exception):
    """Raised when a training run that is waited for fails or is cancelled.

    Attributes:
        name: `projects/{project}/trainingRuns/{id}`.
        state: `failed` or `cancelled`.
    """

    def __init__(self, name: str, state: str, message: str) -> None:
        """Keeps what is known of the run."""
        super().__init__(f"The run {name} ended as {state}{': ' if message else ''}{message or '.'}")
        self.name = name
        self.state = state


class Step(View[training_run_pb2.StepMetrics]):
    """The metrics of one step."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("number", "reward", "validation", "loss")

    @property
    def number(self) -> int:
        """Number of the step, from 1; 0 for measurements before the first."""
        return int(self.proto.step)

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics by name; docs/metrics.md explains them."""
        return dict(self.proto.values)

    @property
    def reward(self) -> float | None:
        """Mean reward of the step's rollouts; None if there were none."""
        return self.metrics.get("reward_mean")

    @property
    def validation(self) -> float | None:
        """Accuracy on the validation tasks, 0 to 1, or loss on the validation demonstrations; None if not measured."""
        return next((self.metrics[name] for name in VALIDATION if name in self.metrics), None)

    @property
    def loss(self) -> float | None:
        """Loss of the step; None if there was none."""
        return self.metrics.get("loss")

    def __getitem__(self, name: str) -> float:
        """Returns a metric by name; raises KeyError if it was not measured."""
        return self.metrics[name]


class Checkpoint(View[training_run_pb2.Checkpoint]):
    """A checkpoint that a run can be rolled back to."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("number", "step", "reward")

    @property
    def name(self) -> str:
        """`projects/{project}/trainingRuns/{id}/checkpoints/{n}`."""
        return str(self.proto.name)

    @property
    def number(self) -> int:
        """Number of the checkpoint in its run, from 1."""
        return int(self.proto.sequence)

    @property
    def step(self) -> int:
        """The step after which it was written."""
        return int(self.proto.step)

    @property
    def reward(self) -> float | None:
        """Mean reward of the steps before it; None if there is none."""
        return float(self.proto.reward_mean) if self.proto.HasField("reward_mean") else None

    @property
    def policy_version(self) -> str:
        """The policy version at that step."""
        return str(self.proto.policy_version)

    @property
    def size_bytes(self) -> int:
        """Size on disk."""
        return int(self.proto.size_bytes)

    @property
    def create_time(self) -> datetime.datetime | None:
        """When it was written, UTC."""
        return moment(self.proto.create_time)
