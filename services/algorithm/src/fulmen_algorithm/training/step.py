# ruff: noqa: N806 (tensor names end with their shape)
"""One optimiser step, and one batch of them: forward, backward, clip, step, or nothing at all.

Invariant: a step whose loss or gradient norm is not finite changes no weight, no moment and no schedule; it is counted.

Legend: B lines, T positions.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from fulmen_algorithm.training.losses import (
    LossSettings,
    TokenSums,
    cross_entropy_loss,
    loss_metrics,
    policy_loss,
    token_sums,
    token_weights,
)
from fulmen_algorithm.training.packing import MicroBatch, PackingMode, pack
from fulmen_algorithm.training.policy import OptimizerSettings, PolicyModel, make_optimizer, make_schedule
from fulmen_algorithm.training.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of an optimiser step.

    Attributes:
        loss: Clip, importance cap, aggregation, KL.
        temperature: Temperature at which the rollouts were sampled.
        max_grad_norm: Gradients are scaled down to this global norm.
        token_budget: Positions per micro-batch.
        packing: Padded or packed micro-batches.
    """

    loss: LossSettings = field(default_factory=LossSettings)
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    token_budget: int = 8192
    packing: PackingMode = PackingMode.PADDED


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How a batch of rows becomes optimiser steps.

    Attributes:
        minibatches: Optimiser steps per pass; rows of one rollout stay together.
        epochs: Passes over the batch.
        recompute_proximal: Whether proximal log-probabilities come from a forward pass at the start of the batch (one
            more forward; the importance weight then corrects for staleness). If not, the sampler's are used in their
            place (the bypass, also called 2-policy mode) and the clip alone bounds the step.
    """

    minibatches: int = 1
    epochs: int = 1
    recompute_proximal: bool = True


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """What a training run changes: the policy, its optimiser, its schedule and its counters."""

    policy: PolicyModel
    optimizer: torch.optim.AdamW
    schedule: torch.optim.lr_scheduler.LambdaLR
    optimizer_steps: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of one optimiser step.

    Attributes:
        loss: Value of the loss before the step.
        grad_norm: Global gradient norm before clipping.
        skipped: Whether the step was left out because a number was not finite, or nothing trained.
        learning_rate: Learning rate that applied.
        seconds: Wall time.
        metrics: `loss_metrics` of the step.
    """

    loss: float
    grad_norm: float
    skipped: bool
    learning_rate: float
    seconds: float
    metrics: dict[str, float]

    def as_metrics(self) -> dict[str, float]:
        """Flattens everything into one mapping of numbers."""
        flat = asdict(self)
        return {**flat.pop("metrics"), **{k: float(v) for k, v in flat.items()}}


def make_state(policy: PolicyModel, settings: OptimizerSettings) -> TrainingState:
    """Builds a fresh training state around a policy."""
    optimizer = make_optimizer(policy, settings)
    return TrainingState(policy=policy, optimizer=optimizer, schedule=make_schedule(optimizer, settings))


def train_step(
    state: TrainingState,
    rows: Sequence[Row],
    *,
    settings: StepSettings,
    current_version: int = 0,
    proximal_logprobs: Sequence[Sequence[float]] | None = None,
    reference: PolicyModel | None = None,
) -> StepResult:
    """Takes one policy-gradient step on all `rows`.

    Args:
        state: Changed in place.
        rows: R rows; the loss is normalised over all of them, whatever the micro-batches.
        settings: Loss, temperature, clipping, budget.
        current_version: Policy version being trained; staleness is counted against it.
        proximal_logprobs: R sequences of per-token log-probabilities at the start of the batch; None takes those of
            this very forward pass (right for the first step of a batch).
        reference: Frozen policy of the KL penalty.

    Raises:
        ValueError: if a row is longer than the token budget.
    """
    weights = token_weights(rows, settings.loss.aggregation)
    sums: list[TokenSums] = []

    def loss_of(batch: MicroBatch) -> Tensor:
        logprobs_BT = state.policy.token_logprobs(batch, temperature=settings.temperature)
        device = logprobs_BT.device
        proximal_BT = logprobs_BT.detach()
        if proximal_logprobs is not None:
            proximal_BT = _spread(batch, proximal_logprobs).to(device)
        reference_BT = None
        if reference is not None:
            with torch.no_grad():
                reference_BT = reference.token_logprobs(batch, temperature=settings.temperature).to(device)
        sampler_BT, advantages_BT = batch.old_logprobs_BT.to(device), batch.advantages_BT.to(device)
        sums.append(
            token_sums(
                logprobs_BT=logprobs_BT,
                proximal_BT=proximal_BT,
                sampler_BT=sampler_BT,
                advantages_BT=advantages_BT,
                mask_BT=batch.loss_mask_BT.to(device),
                versions_BT=batch.versions_BT.to(device),
                current_version=current_version,
                settings=settings.loss,
                reference_BT=reference_BT,
            )
        )
        return policy_loss(
            logprobs_BT=logprobs_BT,
            proximal_BT=proximal_BT,
            sampler_BT=sampler_BT,
            advantages_BT=advantages_BT,
            weights_BT=_weights(batch, weights).to(device),
            settings=settings.loss,
            reference_BT=reference_BT,
        )

    return _optimise(state, rows, settings, loss_of, sums)


def sft_step(state: TrainingState, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
    """Takes one supervised step: cross-entropy on the tokens that train; `old_logprobs` and `advantage` are not read.

    Raises:
        ValueError: if a row is longer than the token budget.
    """
    weights = token_weights(rows, settings.loss.aggregation)

    def loss_of(batch: MicroBatch) -> Tensor:
        logprobs_BT = state.policy.token_logprobs(batch)
        return cross_entropy_loss(logprobs_BT=logprobs_BT, weights_BT=_weights(batch, weights).to(logprobs_BT.device))

    return _optimise(state, rows, settings, loss_of, [])


def train_batch(
    state: TrainingState,
    rows: Sequence[Row],
    *,
    settings: StepSettings,
    batch: BatchSettings,
    seed: int,
    current_version: int = 0,
    reference: PolicyModel | None = None,
    keep_going: Callable[[], bool] | None = None,
) -> list[StepResult]:
    """Takes `epochs * minibatches` steps on a batch of rows.

    Rows of one rollout stay in one minibatch; minibatches are drawn anew each epoch by `seed`. Rows without advantage
    are left in: they count in the normaliser only if the caller keeps them.

    Args:
        state: Changed in place.
        rows: The batch.
        settings: Settings of each step.
        batch: Minibatches, epochs, proximal policy.
        seed: Seed of the shuffling; pass another one for each batch.
        current_version: Policy version being trained.
        reference: Frozen policy of the KL penalty.
        keep_going: Asked before each step; false ends the batch early (cancellation from another thread).

    Returns:
        One result per step taken.
    """
    proximal: Sequence[Sequence[float]] | None = None
    if not batch.recompute_proximal:
        proximal = [row.old_logprobs for row in rows]
    elif batch.minibatches * batch.epochs > 1:
        proximal = logprobs_of(state.policy, rows, settings=settings)
    results: list[StepResult] = []
    for indices in _minibatches(rows, batch, seed):
        if keep_going is not None and not keep_going():
            break
        results.append(
            train_step(
                state,
                [rows[i] for i in indices],
                settings=settings,
                current_version=current_version,
                proximal_logprobs=None if proximal is None else [proximal[i] for i in indices],
                reference=reference,
            )
        )
    return results


@torch.no_grad()
def logprobs_of(policy: PolicyModel, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
    """Computes each row's per-token log-probabilities under `policy`, in the order of `rows`."""
    result: list[list[float]] = [[] for _ in rows]
    for micro in pack(
        rows, token_budget=settings.token_budget, pad_token_id=policy.pad_token_id, mode=settings.packing
    ):
        logprobs = policy.token_logprobs(micro, temperature=settings.temperature).flatten().tolist()
        for index, value in zip(micro.row_index_BT.flatten().tolist(), logprobs, strict=True):
            if index >= 0:
                result[index].append(value)
    return result


def _optimise(
    state: TrainingState,
    rows: Sequence[Row],
    settings: StepSettings,
    loss_of: Callable[[MicroBatch], Tensor],
    sums: list[TokenSums],
) -> StepResult:
    """Accumulates gradients over micro-batches, then steps if every number is finite."""
    started = perf_counter()
    rate = float(state.schedule.get_last_lr()[0])
    state.optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    for micro in pack(
        rows, token_budget=settings.token_budget, pad_token_id=state.policy.pad_token_id, mode=settings.packing
    ):
        part = loss_of(micro)
        part.backward()
        loss += float(part.detach())
    trained = any(row.trained_tokens for row in rows)
    norm = float(torch.nn.utils.clip_grad_norm_(state.policy.model.parameters(), settings.max_grad_norm))
    skipped = not (trained and math.isfinite(loss) and math.isfinite(norm))
    if skipped:
        state.skipped_steps += 1
    else:
        state.optimizer.step()
        state.schedule.step()
        state.optimizer_steps += 1
    state.optimizer.zero_grad(set_to_none=True)
    positions = sum(len(row.token_ids) for row in rows)
    return StepResult(
        loss=loss,
        grad_norm=norm,
        skipped=skipped,
        learning_rate=rate,
        seconds=perf_counter() - started,
        metrics=loss_metrics(sums, positions=positions) if sums else {},
    )


def _minibatches(rows: Sequence[Row], batch: BatchSettings, seed: int) -> Iterator[list[int]]:
    by_rollout: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_rollout.setdefault(row.rollout_id, []).append(index)
    shuffler = random.Random(seed)
    for _ in range(batch.epochs):
        rollouts = list(by_rollout)
        shuffler.shuffle(rollouts)
        for part in range(min(batch.minibatches, len(rollouts))):
            yield [i for rollout in rollouts[part :: batch.minibatches] for i in by_rollout[rollout]]


def _weights(batch: MicroBatch, weights: Sequence[float]) -> Tensor:
    # Padding has row index -1, which picks the appended 0.
    table = torch.tensor([*weights, 0.0], dtype=torch.float32)
    return table[batch.row_index_BT] * batch.loss_mask_BT


def _spread(batch: MicroBatch, values: Sequence[Sequence[float]]) -> Tensor:
    """Lays per-token values of the rows out like the micro-batch."""
    spread_BT = torch.zeros(batch.input_ids_BT.shape, dtype=torch.float32)
    for index in batch.row_index_BT.unique().tolist():
        if index >= 0:
            # Tokens of a row are contiguous and in order, so a boolean selection keeps their order.
            spread_BT[batch.row_index_BT == index] = torch.tensor(values[index], dtype=torch.float32)
    return spread_BT
