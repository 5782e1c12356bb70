# ruff: noqa: N803, N806 (tensor names end with their shape)
"""The primitives of a training loop: a gradient that adds up over calls, and an optimizer step with it.

The loss is a sum over tokens, so gradients of two calls are those of one call with the rows of both. Invariant: a pass
that fails, and a step whose gradient is not finite, changes no weight, no moment and no gradient of earlier calls.

Legend: B lines, T positions.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fulmen_algorithm.losses.loss_terms import TokenBatch
from fulmen_algorithm.losses.losses import TokenSums, cross_entropy_loss, loss_metrics, policy_loss, token_sums
from fulmen_algorithm.losses.objectives import Loss, NoCorrection, Objective, Proximal
from fulmen_algorithm.training.gradient_norms import clip_gradients, gradient_norm
from fulmen_algorithm.training.micro_batches import micro_batches
from fulmen_algorithm.training.packing import MicroBatch, spread
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.primitives_settings import AdamStep, PassResult, PassSettings
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import StepSettings
from fulmen_algorithm.training.state import TrainingState

OF_VERSIONS = frozenset({"staleness_mean", "staleness_max"})
OF_CORRECTIONS = frozenset({"capped_share", "correction_masked_share", "kl_reference"})
UNUSED_METRICS = OF_VERSIONS | OF_CORRECTIONS
"""Metrics of `loss_metrics` that are constant here, where rows have no version and the objective no correction."""


def trainable(policy: PolicyModel) -> list[nn.Parameter]:
    """Returns the trained parameters: all, or the adapters'."""
    return [parameter for parameter in policy.model.parameters() if parameter.requires_grad]


def forward_backward(
    state: TrainingState, rows: Sequence[Row], weights: Sequence[Sequence[float]], *, settings: PassSettings
) -> PassResult:
    """Adds the gradient of the rows' loss to that of earlier calls.

    Args:
        state: Its gradients are changed in place.
        rows: R rows, whose mask is true where the weight is not 0.
        weights: Weight of each token of each row.
        settings: Loss and temperature.
    """
    parameters = trainable(state.policy)
    # Earlier gradients are kept apart, so that a pass that fails does not leave a part of its own in them.
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        result = _passes(state.policy, rows, weights, settings)
    except BaseException:
        _replace_gradients(parameters, earlier)
        raise
    for parameter, before in zip(parameters, earlier, strict=True):
        if before is not None and not (settings.fresh and not settings.forward_only):
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
    return result


def adam_step(state: TrainingState, step: AdamStep) -> tuple[float, bool]:
    """Takes one step with the gradient, and drops it.

    Returns:
        The gradient's norm after the division and before scaling, and whether the step was skipped as not finite.
    """
    parameters = trainable(state.policy)
    if step.divisor != 1.0:
        torch._foreach_div_([each.grad for each in parameters if each.grad is not None], step.divisor)
    limited = math.isfinite(step.max_grad_norm)
    norm = clip_gradients(parameters, step.max_grad_norm) if limited else gradient_norm(parameters)
    skipped = not math.isfinite(norm)
    if skipped:
        state.skipped_steps += 1
    else:
        for group in state.optimizer.param_groups:
            group["lr"], group["betas"], group["eps"] = step.learning_rate, (step.beta1, step.beta2), step.epsilon
            group["weight_decay"] = step.weight_decay if group["params"][0].ndim >= 2 else 0.0
        state.optimizer.step()
        state.optimizer_steps += 1
    state.optimizer.zero_grad(set_to_none=True)
    return norm, skipped


def _passes(
    policy: PolicyModel, rows: Sequence[Row], weights: Sequence[Sequence[float]], settings: PassSettings
) -> PassResult:
    longest = max(len(row.token_ids) for row in rows)
    budget = StepSettings(token_budget=max(settings.token_budget, longest), temperature=settings.temperature)
    loss_sum, sums = 0.0, list[TokenSums]()
    found: list[list[float]] = [[0.0] * len(row.token_ids) for row in rows]
    for micro in micro_batches(policy, rows, budget)[0]:
        with torch.no_grad() if settings.forward_only else nullcontext():
            logprobs_BT = policy.token_logprobs(micro, temperature=settings.temperature, trained_only=True)
            weights_BT = spread(micro, weights).to(logprobs_BT.device)
            loss = _loss(micro, logprobs_BT, weights_BT, settings.loss, sums)
        if not settings.forward_only:
            loss.backward()
        loss_sum += float(loss.detach())
        for index in micro.row_index_BT.unique().tolist():
            if index >= 0:
                found[index] = logprobs_BT.detach().cpu()[micro.row_index_BT == index].tolist()
    tokens = sum(row.trained_tokens for row in rows)
    positions = sum(len(row.token_ids) for row in rows)
    metrics = loss_metrics(sums, positions=positions) if sums else {"tokens": float(tokens)}
    return PassResult(
        loss_sum=loss_sum,
        weight_sum=math.fsum(weight for row in weights for weight in row),
        metrics={name: value for name, value in metrics.items() if name not in UNUSED_METRICS},
        logprobs=found,
    )


def _loss(
    micro: MicroBatch, logprobs_BT: Tensor, weights_BT: Tensor, loss: Loss | None, sums: list[TokenSums]
) -> Tensor:
    if loss is None:
        return cross_entropy_loss(logprobs_BT=logprobs_BT, weights_BT=weights_BT)
    device = logprobs_BT.device
    sampler_BT = micro.old_logprobs_BT.to(device)
    tokens = TokenBatch(
        logprobs_BT=logprobs_BT,
        proximal_BT=sampler_BT,
        sampler_BT=sampler_BT,
        advantages_BT=micro.advantages_BT.to(device),
        mask_BT=micro.loss_mask_BT.to(device),
        row_index_BT=micro.row_index_BT.to(device),
    )
    objective = Objective(loss=loss, correction=NoCorrection(), proximal=Proximal.SAMPLER)
    versions_BT = micro.versions_BT.to(device)
    sums.append(token_sums(tokens, versions_BT=versions_BT, current_version=0, objective=objective))
    return policy_loss(tokens, weights_BT=weights_BT, objective=objective)


def _replace_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
