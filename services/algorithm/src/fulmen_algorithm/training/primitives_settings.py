"""Settings and results of the primitives of training, as plain values importable without torch."""

from dataclasses import dataclass

from fulmen_algorithm.losses.objectives import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """Settings of a pass.

    Attributes:
        loss: Policy loss; None for cross-entropy.
        temperature: Temperature at which the rows were sampled.
        token_budget: Positions per micro-batch; a longer row is one by itself.
        forward_only: Whether no gradient is computed.
        fresh: Whether the gradient of earlier passes is dropped.
    """

    loss: Loss | None = None
    temperature: float = 1.0
    token_budget: int = 8192
    forward_only: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Outcome of a pass.

    Attributes:
        loss_sum: Sum over tokens of weight times term.
        weight_sum: Sum of the weights.
        metrics: `loss_metrics` of the pass.
        logprobs: Log-probability of each token of each row; 0.0 where it has no weight.
    """

    loss_sum: float
    weight_sum: float
    metrics: dict[str, float]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Settings of one step.

    Attributes:
        divisor: By which the gradient is divided first.
        max_grad_norm: Norm to which a larger gradient is scaled down.
    """

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    divisor: float = 1.0
