# ruff: noqa: N806 (tensor names end with their shape)
"""One optimiser step, or a batch of steps: forward, backward, clip, and step or skip.

All ranks of a group call these functions with the same rows and get the same results. Invariant: a step whose loss or
gradient norm is not finite changes no weight and no moment; it is counted.

Legend: B lines, T positions.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fulmen_algorithm.losses.covariance import chosen_tokens
from fulmen_algorithm.losses.entropy_settings import ClipCovLoss, KlCovLoss
from fulmen_algorithm.losses.loss_terms import TokenBatch
from fulmen_algorithm.losses.losses import (
    TokenSums,
    cross_entropy_loss,
    loss_metrics,
    policy_loss,
    token_sums,
    token_weights,
)
from fulmen_algorithm.losses.objectives import Proximal
from fulmen_algorithm.training.critic import Critic
from fulmen_algorithm.training.engine_mismatch import ROWS, engine_mismatch, is_fresh, routing_mismatch
from fulmen_algorithm.training.gradient_norms import clip_gradients, gradient_norm
from fulmen_algorithm.training.optimizer import LearningRate, NormWatch
from fulmen_algorithm.training.optimizers import make_optimizer
from fulmen_algorithm.training.packing import Layout, MicroBatch, empty_micro_batch, micro_batch, spread
from fulmen_algorithm.training.parallel import (
    AllReduce,
    GradientReducer,
    layouts_of,
    wait_for,
)
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.randomness import generators
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, OptimizerSettings, StepResult, StepSettings
from fulmen_algorithm.training.tensor_parallel import agree_on_gradients
from fulmen_exchange.ranks import StepInfo


@dataclass(slots=True, kw_only=True)
class BatchProgress:
    """How far a batch is trained: what other ranks need to go on with it, besides the training state.

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


def train_step(
    state: TrainingState,
    rows: Sequence[Row],
    *,
    settings: StepSettings,
    current_version: int = 0,
    proximal_logprobs: Sequence[Sequence[float]] | None = None,
    reference: PolicyModel | None = None,
    seed: int = 0,
) -> StepResult:
    """Takes one policy-gradient step on all `rows`.

    Args:
        state: Changed in place.
        rows: R rows; the loss is normalised over all of them, whatever the micro-batches.
        settings: Loss, temperature, clipping, budget.
        current_version: Policy version being trained; staleness is counted against it.
        proximal_logprobs: R sequences of per-token log-probabilities at the start of the batch; None for those of
            this forward pass (correct for the first step of a batch).
        reference: Frozen policy of the KL penalty.
        seed: Seed of the draw of the loss `clip_cov`.

    Raises:
        ValueError: if a row is longer than the token budget.
    """
    objective = settings.objective
    weights = token_weights(rows, objective.aggregation)
    chosen: Sequence[Sequence[bool]] | None = None
    if isinstance(objective.loss, ClipCovLoss | KlCovLoss):
        known = proximal_logprobs or logprobs_of(state.policy, rows, settings=settings, trained_only=True)
        chosen = chosen_tokens(rows, known, objective.loss, seed=seed)
    sums: list[TokenSums] = []

    def loss_of(batch: MicroBatch) -> Tensor:
        scores = state.policy.token_scores(batch, temperature=settings.temperature, trained_only=True, entropy=True)
        logprobs_BT = scores.logprobs_BT
        device = logprobs_BT.device
        proximal_BT = logprobs_BT.detach()
        if proximal_logprobs is not None:
            proximal_BT = spread(batch, proximal_logprobs).to(device)
        reference_BT = None
        if reference is not None:
            with torch.no_grad():
                of_reference_BT = reference.token_logprobs(batch, temperature=settings.temperature, trained_only=True)
                reference_BT = of_reference_BT.to(device)
        tokens = TokenBatch(
            logprobs_BT=logprobs_BT,
            proximal_BT=proximal_BT,
            sampler_BT=batch.old_logprobs_BT.to(device),
            advantages_BT=batch.advantages_BT.to(device),
            mask_BT=batch.loss_mask_BT.to(device),
            row_index_BT=batch.row_index_BT.to(device),
            reference_BT=reference_BT,
            entropy_BT=scores.entropy_BT,
            chosen_BT=None if chosen is None else spread(batch, chosen).to(device).bool(),
        )
        versions_BT = batch.versions_BT.to(device)
        sums.append(token_sums(tokens, versions_BT=versions_BT, current_version=current_version, objective=objective))
        return policy_loss(tokens, weights_BT=_weights(batch, weights).to(device), objective=objective)

    return _optimise(state, rows, settings, loss_of, sums, beside=reference)


def sft_step(state: TrainingState, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
    """Takes one supervised step: cross-entropy on the tokens that train; `old_logprobs` and `advantages` are not read.

    Raises:
        ValueError: if a row is longer than the token budget.
    """
    weights = token_weights(rows, settings.objective.aggregation)

    def loss_of(batch: MicroBatch) -> Tensor:
        logprobs_BT = state.policy.token_logprobs(batch, trained_only=True)
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
    begun: BatchProgress | None = None,
) -> list[StepResult]:
    """Takes `epochs * minibatches` steps on a batch of rows.

    Rows of one rollout stay in one minibatch; minibatches are redrawn each epoch by `seed`. Rows without advantage
    are left in: they count in the normaliser only if the caller keeps them. With a critic the advantages are computed
    here from the rows' rewards, and the critic is trained on the same minibatches.

    Args:
        state: Changed in place.
        rows: The batch.
        settings: Settings of each step.
        batch: Minibatches and epochs.
        seed: Seed of the shuffling; pass another one for each batch.
        current_version: Policy version being trained.
        reference: Frozen policy of the KL penalty.
        begun: Progress of the same batch on ranks whose state was restored; its steps are not taken again.

    Returns:
        One result per step taken.
    """
    state.batch = begun = begun or _begin(state.policy, rows, settings, batch, current_version)
    proximal: Sequence[Sequence[float]] | None = begun.proximal
    if settings.objective.proximal is Proximal.SAMPLER:
        proximal = [row.old_logprobs for row in rows]
    mode, critic_targets = state.policy.packing(settings.packing), None
    if state.critic is not None:
        critic_targets = state.critic.assess(rows, token_budget=settings.token_budget, mode=mode)
        rows = critic_targets.rows
    results, done = begun.results, len(begun.results)
    for number, indices in list(enumerate(_minibatches(rows, batch, seed)))[done:]:
        results.append(
            train_step(
                state,
                [rows[i] for i in indices],
                settings=settings.later(number),
                current_version=current_version,
                proximal_logprobs=None if proximal is None else [proximal[i] for i in indices],
                reference=reference,
                seed=seed + number,
            )
        )
        if state.critic is not None and critic_targets is not None:
            metrics = state.critic.learn(
                critic_targets,
                indices,
                token_budget=settings.token_budget,
                mode=mode,
                explosion_factor=settings.explosion_factor,
            )
            results[-1] = replace(results[-1], metrics={**results[-1].metrics, **metrics})
    return [replace(result, metrics={**result.metrics, **begun.mismatch}) for result in results]


def _begin(
    policy: PolicyModel, rows: Sequence[Row], settings: StepSettings, batch: BatchSettings, current_version: int
) -> BatchProgress:
    """Computes what a batch needs of the policy as it is before its first step."""
    proximal = None
    if settings.objective.proximal is not Proximal.SAMPLER and batch.minibatches * batch.epochs > 1:
        proximal = logprobs_of(policy, rows, settings=settings, trained_only=True)
    mismatch = _engine_mismatch(policy, rows, proximal, settings, current_version) if batch.measure_mismatch else {}
    return BatchProgress(proximal=proximal, mismatch=mismatch)


def _engine_mismatch(
    policy: PolicyModel,
    rows: Sequence[Row],
    known: Sequence[Sequence[float]] | None,
    settings: StepSettings,
    current_version: int,
) -> dict[str, float]:
    """Compares the sampler with the present policy; a few rows suffice where training needs no pass over all of them."""
    fresh = [index for index, row in enumerate(rows) if is_fresh(row, current_version=current_version)]
    some = [rows[i] for i in fresh[:ROWS]]
    found = {} if known is None else engine_mismatch([rows[i] for i in fresh], [known[i] for i in fresh])
    routed = any(row.routed_experts is not None for row in some)
    if not some or not (routed or known is None):
        return found
    if routed:
        policy.routes.count()
    computed = logprobs_of(policy, some, settings=settings, trained_only=True)
    if known is None:
        found = engine_mismatch(some, computed)
    return found | routing_mismatch(rows, policy.ranks.gather(policy.routes.counted())) if routed else found


@torch.no_grad()
def logprobs_of(
    policy: PolicyModel, rows: Sequence[Row], *, settings: StepSettings, trained_only: bool = False
) -> list[list[float]]:
    """Computes each row's per-token log-probabilities under `policy`, in the order of `rows`.

    With `trained_only` those of the tokens that train, and 0.0 for the others: of a long prompt no logits are computed.
    """
    ranks = policy.ranks
    found: dict[int, list[float]] = {}
    for micro in micro_batches(policy, rows, settings)[0]:
        logprobs = policy.token_logprobs(micro, temperature=settings.temperature, trained_only=trained_only)
        for index, value in zip(micro.row_index_BT.flatten().tolist(), logprobs.flatten().tolist(), strict=True):
            if index >= 0:
                found.setdefault(index, []).append(value)
    everything = {index: values for part in ranks.gather(found) for index, values in part.items()}
    return [everything[index] for index in range(len(rows))]


def micro_batches(
    policy: PolicyModel, rows: Sequence[Row], settings: StepSettings
) -> tuple[Iterator[MicroBatch], float]:
    """Builds this rank's micro-batches of some rows; also returns the share of tokens in all ranks' positions.

    Each holds rows of one adapter, which is in use when the micro-batch is taken.

    All ranks of a copy of the weights have as many micro-batches: empty ones fill up.
    """
    mode, copy = policy.packing(settings.packing), policy.groups.copy
    ranks, of_copy = policy.groups.sharing(policy.ranks)
    speeds = policy.speeds.by_rank if policy.speeds is not None else ()
    by_adapter: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_adapter.setdefault(policy.adapter_of(row), []).append(index)
    mine: list[tuple[str, list[Layout], int]] = []
    positions = 0
    for adapter, indices in sorted(by_adapter.items()):
        part = [rows[i] for i in indices]
        shares = layouts_of(part, ranks, token_budget=settings.token_budget, mode=mode, speeds=speeds)
        positions += sum(layout.size_tokens for share in shares for layout in share)
        missing = max(map(len, shares[of_copy])) - len(shares[ranks.rank])
        mine.append((adapter, [layout.renumbered(indices) for layout in shares[ranks.rank]], missing))

    def made() -> Iterator[MicroBatch]:
        for adapter, layouts, missing in mine:
            policy.use_adapter(adapter)
            for layout in layouts:
                if ranks.way_out is not None and copy.group is None:
                    ranks.way_out.check()
                yield micro_batch(rows, layout, pad_token_id=policy.pad_token_id, mode=mode)
            for _ in range(missing):
                yield empty_micro_batch(pad_token_id=policy.pad_token_id)

    return made(), sum(len(row.token_ids) for row in rows) / max(positions, 1)


def _optimise(
    state: TrainingState,
    rows: Sequence[Row],
    settings: StepSettings,
    loss_of: Callable[[MicroBatch], Tensor],
    sums: list[TokenSums],
    beside: PolicyModel | None = None,
) -> StepResult:
    """Accumulates gradients over micro-batches and ranks, then steps if every number is finite and none explodes."""
    started = perf_counter()
    policy = state.policy
    if policy.ranks.way_out is not None:
        state.step_start = StepStart(generators=generators(), exchange=state.reducer.state())
    planned = state.tried_steps if settings.planned_steps is None else settings.planned_steps
    rate = state.rate.at(taken=state.optimizer_steps, planned=planned, total=settings.total_steps)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.optimizer.zero_grad(set_to_none=True)
    loss, positions = 0.0, 0
    micros, efficiency = micro_batches(policy, rows, settings)
    for micro in micros:
        positions += 0 if micro.empty else micro.input_ids_BT.numel()
        part = _accompany(policy, micro, beside) if micro.empty else loss_of(micro)
        part.backward()
        loss += float(part.detach())
    policy.forget_routes()
    wait_for(policy.device)
    compute_s = perf_counter() - started
    parameters, reducer, groups = list(policy.model.parameters()), state.reducer, policy.groups
    total = settings.total_steps or state.rate.settings.total_steps
    progress = min(planned / total, 1.0) if total else 0.0
    step_info = StepInfo(progress=progress, metric=settings.metric, compute_s=compute_s)
    agree_on_gradients(policy.model, groups.tensor)
    reducer.reduce(parameters, groups.peers, step_info)
    clips = reducer.clips_sums
    norm = clip_gradients(parameters, settings.max_grad_norm, groups) if clips else gradient_norm(parameters, groups)
    measured = policy.ranks.gather((loss, norm, sums, positions, compute_s))[groups.once]
    losses, norms, sums_of_ranks, positions_of_ranks, seconds_of_ranks = zip(*measured, strict=True)
    if policy.speeds is not None:
        policy.speeds.note(positions_of_ranks, seconds_of_ranks)
    loss = sum(losses)
    trained = any(row.trained_tokens for row in rows)
    # The numbers are the same on every rank, so all take or skip the step alike.
    exploded = state.norms.explodes(norms[0], settings.explosion_factor)
    finite = math.isfinite(loss) and all(map(math.isfinite, norms))
    skipped = not (trained and finite) or exploded
    if skipped:
        state.skipped_steps += 1
    else:
        state.optimizer.step()
        state.optimizer_steps += 1
    state.step_start = None
    state.optimizer.zero_grad(set_to_none=True)
    reducer.on_step()
    exchanged = reducer.drain()
    tokens = sum(len(row.token_ids) for row in rows)
    all_sums = [one for part in sums_of_ranks for one in part]
    seconds = perf_counter() - started
    return StepResult(
        loss=loss,
        grad_norm=norm,
        skipped=skipped,
        exploded=exploded,
        learning_rate=rate,
        seconds=seconds,
        metrics=loss_metrics(all_sums, positions=tokens) if all_sums else {},
        packing_efficiency=efficiency,
        tokens_per_second=tokens / seconds,
        exchange=exchanged.metrics,
        events=exchanged.events,
    )


def _accompany(policy: PolicyModel, empty: MicroBatch, beside: PolicyModel | None) -> Tensor:
    """Runs the passes of an empty micro-batch, so that every rank of a copy enters the same collectives.

    Returns:
        A loss of 0, whose gradient is 0.
    """
    nothing = policy.token_logprobs(empty).sum() * 0.0
    if beside is not None:
        with torch.no_grad():
            beside.token_logprobs(empty)
    return nothing


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
