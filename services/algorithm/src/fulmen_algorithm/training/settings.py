"""Settings and results of training, as plain values importable without torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from fulmen_algorithm.losses.objectives import Objective
from fulmen_algorithm.training.strict import AUTO_BY_NAME, Strict


class PackingMode(StrEnum):
    """How rows share a micro-batch."""

    PADDED = "padded"
    PACKED = "packed"


class Schedule(StrEnum):
    """Shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class AdamW(Strict):
    """Adam with decoupled weight decay (arXiv:1711.05101).

    Attributes:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the root of the second moment.
        fused: Computes the step in one pass over all weights; equal up to rounding.
    """

    kind: Literal["adamw"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0, lt=1)
    fused: bool = False


class Sgd(Strict):
    """Stochastic gradient descent; needs a higher learning rate than AdamW.

    Attributes:
        momentum: Momentum; must be 0 if the codec of the exchange has momentum.
    """

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1)


class Muon(Strict):
    """Momentum whose matrices are made orthogonal (Muon); embeddings, head and vectors are trained by AdamW.

    Steps are scaled to those of AdamW (arXiv:2502.16982, equation 4), so `learning_rate` is one for AdamW.

    Attributes:
        momentum: Momentum, in Nesterov's form.
        iterations: Newton-Schulz iterations of each step.
    """

    kind: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0, lt=1)
    iterations: int = Field(default=5, ge=1, le=20)


UpdateRule = Annotated[AdamW | Muon | Sgd, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """An optimiser and its schedule.

    Attributes:
        learning_rate: Peak learning rate.
        weight_decay: Decoupled weight decay; not for SGD.
        rule: Update rule.
        schedule: Shape after the warm-up.
        warmup_steps: Optimiser steps of linear warm-up, without skipped ones: step k of w, from 1, has k / w of the rate.
        total_steps: Optimiser steps, including skipped ones, at which a linear or cosine schedule reaches 0, unless
            `StepSettings.total_steps` is set; unused by a constant schedule.
    """

    learning_rate: float
    weight_decay: float = 0.0
    rule: UpdateRule = AdamW()  # noqa: RUF009  (it never changes)
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    total_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of an optimiser step.

    Attributes:
        objective: Objective: loss, correction, KL penalty, aggregation.
        temperature: Temperature at which the rollouts were sampled.
        max_grad_norm: Maximum global norm of the gradients, to which larger ones are scaled down.
        explosion_factor: Ratio of a step's gradient norm to the median of earlier norms above which the step is
            skipped; None for no limit.
        token_budget: Positions per micro-batch.
        packing: Padded or packed micro-batches; models in which packed rows would attend to each other are always
            padded.
        planned_steps: Optimiser steps planned before this one, for the learning rate schedule; None for the number of
            attempted steps.
        total_steps: Optimiser steps of the whole run, for the schedule; None for that of `OptimizerSettings`.
        metric: Newest reward, by which the exchange of gradients may be judged, higher is better; None if there is
            none.
    """

    objective: Objective = field(default_factory=Objective)
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    explosion_factor: float | None = None
    token_budget: int = 8192
    packing: PackingMode = PackingMode.PACKED
    planned_steps: int | None = None
    total_steps: int | None = None
    metric: float | None = None

    def later(self, steps: int) -> "StepSettings":
        """Returns the settings of the optimiser step planned `steps` after this one."""
        planned = None if self.planned_steps is None else self.planned_steps + steps
        return replace(self, planned_steps=planned, metric=None if steps else self.metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How a batch of rows becomes optimiser steps.

    Attributes:
        minibatches: Optimiser steps per pass; rows of one rollout stay together.
        epochs: Passes over the batch.
        measure_mismatch: Whether the sampler's log-probabilities are compared with the policy's
            (`training.engine_mismatch`).
    """

    minibatches: int = 1
    epochs: int = 1
    measure_mismatch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of one optimiser step.

    Attributes:
        loss: Value of the loss before the step.
        grad_norm: Global gradient norm before clipping.
        skipped: Whether the step was skipped: a number was not finite, the gradient exploded, or no token trained.
        learning_rate: Learning rate of the step.
        seconds: Wall time.
        metrics: `loss_metrics` of the step.
        packing_efficiency: Tokens of the rows as a share of the computed positions.
        exploded: Whether the gradient exploded.
        tokens_per_second: Tokens of the rows, including those that do not train, per second of wall time.
        exchange: Metrics of the exchange of gradients, of rank 0.
        events: Events of the exchange, for the history of the run.
    """

    loss: float
    grad_norm: float
    skipped: bool
    learning_rate: float
    seconds: float
    metrics: dict[str, float]
    exploded: bool = False
    packing_efficiency: float = 1.0
    tokens_per_second: float = 0.0
    exchange: Mapping[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()

    @property
    def taken(self) -> bool:
        """Whether the step was taken, and so the weights were changed."""
        return not (self.skipped or self.exploded)

    @property
    def exchange_s(self) -> float:
        """Duration of the exchange in seconds, without the wait for slower ranks."""
        return sum(self.exchange.get(f"exchange_{part}_seconds", 0.0) for part in ("encode", "transfer", "decode"))

    def as_metrics(self) -> dict[str, float]:
        """Returns all metrics by name."""
        flat = asdict(self)
        # The plain name is that of the tokens sampled by the engine.
        flat["trained_tokens_per_second"] = flat.pop("tokens_per_second")
        del flat["events"]
        return {**flat.pop("metrics"), **flat.pop("exchange"), **{k: float(v) for k, v in flat.items()}}


class WeightsKind(StrEnum):
    """Format of a published version."""

    FULL = "full"
    DELTA = "delta"
    LORA = "lora"


NumberFormat = Literal["float32", "bfloat16"]


class FullWeights(Strict):
    """Each version is a complete model folder.

    Attributes:
        dtype: Number format of the published weights; training keeps its own. `"auto"` is bfloat16 from 100 million
            parameters, and float32 below.
    """

    kind: Literal["full"] = "full"
    dtype: Annotated[NumberFormat | None, AUTO_BY_NAME] = None

    @property
    def number_format(self) -> NumberFormat:
        """The number format; float32 as long as the model is not known."""
        return self.dtype or "float32"


class DeltaWeights(Strict):
    """Most versions are stored as the bitwise difference from the previous one.

    Attributes:
        dtype: Number format of the published weights, in which versions are compared. In bfloat16 a step leaves most
            values unchanged, in float32 only few.
        full_every: Versions between two complete model folders; bounds the length of a chain of deltas.
        dense_above: Share of the complete weights' bytes above which a complete folder is written instead of a delta.
    """

    kind: Literal["delta"] = "delta"
    dtype: NumberFormat = "bfloat16"
    full_every: int = Field(default=20, ge=1, le=1000)
    dense_above: float = Field(default=0.5, gt=0, le=1)

    @property
    def number_format(self) -> NumberFormat:
        """The number format."""
        return self.dtype


WeightsSettings = Annotated[FullWeights | DeltaWeights, Field(discriminator="kind")]

DEFAULT_ADAPTER = "default"
AdapterRole = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]


class LoraSettings(Strict):
    """Low-rank adapters (arXiv:2106.09685) instead of all weights.

    Attributes:
        rank: r, columns of the low-rank factors.
        alpha: The adapter's output is scaled by alpha / rank.
        dropout: Dropout of an adapter's inputs in training.
        targets: `all-linear`, or the names of the modules with an adapter.
        roles: Roles with separate adapters, each trained on the rows of its role and served as `<policy>.<role>`; empty
            for one adapter for all rows.
    """

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False)] = "all-linear"
    roles: Annotated[tuple[AdapterRole, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _each_role_once(self) -> Self:
        if len(set(self.roles)) != len(self.roles):
            raise ValueError("roles: a role is listed twice")
        return self

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return self.roles or (DEFAULT_ADAPTER,)
