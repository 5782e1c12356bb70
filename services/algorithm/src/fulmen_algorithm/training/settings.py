"""Settings and results of training, as plain values importable without torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from fulmen_algorithm.losses.objectives import Objective
from fulmen_algorithm.training.strict import Strict


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
    """

    kind: Literal["adamw"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0, lt=1)


class Sgd(Strict):
    """Stochastic gradient descent; wants a higher learning rate than AdamW.

    Attributes:
        momentum: 0 for none, and where the codec of the exchange has it.
    """

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1)


UpdateRule = Annotated[AdamW | Sgd, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """An optimiser and its schedule.

    Attributes:
        learning_rate: Peak learning rate.
        weight_decay: Decoupled weight decay, of AdamW alone.
        rule: Update rule.
        schedule: Shape after the warm-up.
        warmup_steps: Optimiser steps of linear warm-up from 0; those that are skipped do not count.
        total_steps: Optimiser steps, skipped ones too, at which a linear or cosine schedule reaches 0, unless a step says
            otherwise; not used by a constant one.
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
        max_grad_norm: Gradients are scaled down to this global norm.
        explosion_factor: A step is skipped whose norm is more than so many times the median of those before it; None:
            none is.
        token_budget: Positions per micro-batch.
        packing: Padded or packed micro-batches; a model in which rows of one line would see each other is padded.
        planned_steps: Optimiser steps planned before this one, by which the learning rate decays; None: the number of
                attempted steps.
        total_steps: Optimiser steps of the whole run, where it decays to 0; None: as the optimiser's settings say.
        metric: Reward that came since the step before, the higher the better, by which the exchange of gradients may be
            judged; None if none did.
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
        """Returns the settings of an optimiser step that is planned so many after this one."""
        planned = None if self.planned_steps is None else self.planned_steps + steps
        return replace(self, planned_steps=planned, metric=None if steps else self.metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How a batch of rows becomes optimiser steps.

    Attributes:
        minibatches: Optimiser steps per pass; rows of one rollout stay together.
        epochs: Passes over the batch.
        measure_mismatch: Whether the sampler's log-probabilities are compared with the policy's (`training.engine_mismatch`).
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
        skipped: Whether the step was left out: a number was not finite, the gradient exploded, or nothing trained.
        learning_rate: Learning rate that applied.
        seconds: Wall time.
        metrics: `loss_metrics` of the step.
        packing_efficiency: Tokens of the rows, as a share of the positions that were computed.
        exploded: Whether the gradient exploded.
        tokens_per_second: Tokens of the rows, those that do not train included, by wall time.
        exchange: Metrics of the exchange of gradients, as rank 0 has them.
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
    def exchange_s(self) -> float:
        """Seconds that the exchange took, but for the wait for ranks that compute for longer."""
        return sum(self.exchange.get(f"exchange_{part}_seconds", 0.0) for part in ("encode", "transfer", "decode"))

    def as_metrics(self) -> dict[str, float]:
        """Flattens everything into one mapping of numbers."""
        flat = asdict(self)
        # Algorithms report the tokens that the engine samples per second under the plain name.
        flat["trained_tokens_per_second"] = flat.pop("tokens_per_second")
        del flat["events"]
        return {**flat.pop("metrics"), **flat.pop("exchange"), **{k: float(v) for k, v in flat.items()}}


class WeightsKind(StrEnum):
    """Format of a published version."""

    FULL = "full"
    DELTA = "delta"
    LORA = "lora"


class FullWeights(Strict):
    """Each version is a complete model folder.

    Attributes:
        dtype: In which the engines get the weights; training itself keeps its own.
    """

    kind: Literal["full"] = "full"
    dtype: Literal["float32", "bfloat16"] = "float32"


class DeltaWeights(Strict):
    """Most versions are what differs from the one before, bit for bit.

    Attributes:
        dtype: In which the engines get the weights, and in which versions are compared. In bfloat16 most values stay
            as they are in one step, in float32 few do.
        full_every: Every so many versions a complete folder is written, so that no chain is longer.
        dense_above: A delta of more than this share of the complete weights' bytes is not worth it.
    """

    kind: Literal["delta"] = "delta"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    full_every: int = Field(default=20, ge=1, le=1000)
    dense_above: float = Field(default=0.5, gt=0, le=1)


WeightsSettings = Annotated[FullWeights | DeltaWeights, Field(discriminator="kind")]

DEFAULT_ADAPTER = "default"
AdapterRole = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]


class LoraSettings(Strict):
    """Low-rank adapters (arXiv:2106.09685) instead of all weights.

    Attributes:
        rank: r, columns of the low-rank factors.
        alpha: The adapter's output is scaled by alpha / rank.
        dropout: Share of an adapter's inputs that is left out in training; engines know none.
        targets: `all-linear`, or the names of the modules that get an adapter.
        roles: One adapter for each, trained on the rows of that role and served as `<policy>.<role>`; none: one adapter
            for all rows.
    """

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False)] = "all-linear"
    roles: tuple[AdapterRole, ...] = ()

    @model_validator(mode="after")
    def _each_role_once(self) -> Self:
        if len(set(self.roles)) != len(self.roles):
            raise ValueError("roles: one of them is there twice")
        return self

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return self.roles or (DEFAULT_ADAPTER,)
