# ruff: noqa: N806 (tensor names end with their shape)
"""One optimiser step, or a batch of steps: forward, backward, clip, and step or skip.

All ranks of a group call these functions with the same rows and get the same results. Invariant: a step whose loss or
gradient norm is not finite changes no weight and no moment; it is counted.

Legend: B lines, T positions.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

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
from fulmen_algorithm.training.engine_mismatch import ROWS, engine_mismatch, is_fresh, routing_mismatch
from fulmen_algorithm.training.gradient_norms import clip_gradients, gradient_norm
from fulmen_algorithm.training.micro_batches import logprobs_of, micro_batches
from fulmen_algorithm.training.packing import MicroBatch, spread
from fulmen_algorithm.training.parallel import wait_for
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.randomness import generators
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings
from fulmen_algorithm.training.state import BatchProgress, StepStart, TrainingState
from fulmen_algorithm.training.tensor_parallel import agree_on_gradients
from fulmen_exchange.ranks import StepInfo


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
    policy, reducer = state.policy, state.reducer
    if policy.ranks.way_out is not None:
        state.step_start = StepStart(generators=generators(), exchange=reducer.state())
    planned = state.tried_steps if settings.planned_steps is None else settings.planned_steps
    rate = state.rate.at(taken=state.optimizer_steps, planned=planned, total=settings.total_steps)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.optimizer.zero_grad(set_to_none=True)
    loss, positions, efficiency = _accumulate(policy, rows, settings, loss_of, beside)
    compute_s = perf_counter() - started
    norm = _reduce(state, settings, planned=planned, compute_s=compute_s)
    measured = policy.ranks.gather((loss, norm, sums, positions, compute_s))[policy.groups.once]
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


def _accumulate(
    policy: PolicyModel,
    rows: Sequence[Row],
    settings: StepSettings,
    loss_of: Callable[[MicroBatch], Tensor],
    beside: PolicyModel | None,
) -> tuple[float, int, float]:
    """Adds this rank's gradients of some rows to those of the policy.

    Returns:
        The sum of the losses, the positions of the micro-batches, and the share of tokens in all ranks' positions.
    """
    loss, positions = 0.0, 0
    micros, efficiency = micro_batches(policy, rows, settings)
    for micro in micros:
        positions += 0 if micro.empty else micro.input_ids_BT.numel()
        part = _accompany(policy, micro, beside) if micro.empty else loss_of(micro)
        part.backward()
        loss += float(part.detach())
    policy.forget_routes()
    wait_for(policy.device)
    return loss, positions, efficiency


def _reduce(state: TrainingState, settings: StepSettings, *, planned: int, compute_s: float) -> float:
    """Sums the gradients over ranks, clips the sum unless each rank's part is clipped, and returns the norm before that.

    Args:
        state: Its policy has this rank's gradients.
        settings: The step's.
        planned: Steps before this one.
        compute_s: Time that this rank's gradients took.
    """
    policy, reducer, groups = state.policy, state.reducer, state.policy.groups
    total = settings.total_steps or state.rate.settings.total_steps
    progress = min(planned / total, 1.0) if total else 0.0
    parameters = list(policy.model.parameters())
    agree_on_gradients(policy.model, groups.tensor)
    reducer.reduce(parameters, groups.peers, StepInfo(progress=progress, metric=settings.metric, compute_s=compute_s))
    if reducer.clips_sums:
        return clip_gradients(parameters, settings.max_grad_norm, groups)
    return gradient_norm(parameters, groups)


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
