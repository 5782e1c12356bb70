"""Rows with made-up log-probabilities under every policy, and what the loss code makes of them, in float64."""

import numpy as np
import torch

from fulmen_algorithm.losses.loss_terms import TokenBatch
from fulmen_algorithm.losses.losses import policy_loss, token_weights
from fulmen_algorithm.losses.objectives import Objective
from fulmen_algorithm.training.rows import NO_VERSION, Row
from fulmen_algorithm.training.settings import PackingMode
from tests.support.algorithm.micro_batches import pack
from tests.support.algorithm.reference_losses import Sample


def samples(seed: int, *, rows: int = 6, spread: float = 0.3) -> list[Sample]:
    """Rows of 0 to 5 trained tokens: some share a rollout, more share a group; advantages differ by token."""
    chance = np.random.default_rng(seed)
    made = []
    for index in range(rows):
        count = 3 if index == 0 else int(chance.integers(0, 6))
        pi = -chance.exponential(1.0, count) - 0.01
        made.append(
            Sample(
                rollout=f"rollout-{min(index, rows - 2)}",
                group=f"group-{index % 3 if index < rows - 2 else 0}",
                pi=pi,
                proximal=pi + chance.normal(0, spread, count),
                mu=pi + chance.normal(0, 2 * spread, count),
                reference=pi + chance.normal(0, 0.5, count),
                advantages=chance.normal(0, 1, count),
            )
        )
    return made


def row_of(sample: Sample, *, prompt: int = 2) -> Row:
    """The row: a prompt, and an observation that does not train before its last token."""
    count = len(sample.pi)
    trained = [False] * prompt + [True] * count
    if count > 1:
        trained.insert(-1, False)
    spread = iter(range(count))
    order = [next(spread) if flag else None for flag in trained]
    return Row(
        rollout_id=sample.rollout,
        token_ids=tuple(range(len(trained))),
        loss_mask=tuple(trained),
        old_logprobs=tuple(0.0 if at is None else float(sample.mu[at]) for at in order),
        advantages=tuple(0.0 if at is None else float(sample.advantages[at]) for at in order),
        policy_versions=tuple(NO_VERSION if at is None else 0 for at in order),
        group=sample.group,
    )


def computed(
    made: list[Sample],
    objective: Objective,
    *,
    mode: PackingMode = PackingMode.PADDED,
    budget: int = 1000,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, list[np.ndarray]]:
    """Value of the loss, and its gradient by each trained token of each row; masked positions hold wild numbers."""
    rows = [row_of(sample) for sample in made]
    weights = token_weights(rows, objective.aggregation)
    value, slopes = 0.0, [np.zeros(0) for _ in made]
    for micro in pack(rows, token_budget=budget, pad_token_id=0, mode=mode):
        trains = micro.loss_mask_BT
        owner = micro.row_index_BT

        def laid_out(name: str, wild: float, owner=owner, trains=trains) -> torch.Tensor:
            tensor = torch.full(owner.shape, wild, dtype=dtype)
            for index in owner.unique().tolist():
                if index >= 0:
                    tensor[(owner == index) & trains] = torch.tensor(getattr(made[index], name), dtype=dtype)
            return tensor

        pi = laid_out("pi", 0.0).requires_grad_()
        batch = TokenBatch(
            logprobs_BT=pi,
            proximal_BT=laid_out("proximal", -1e30),
            sampler_BT=laid_out("mu", -1e30),
            advantages_BT=laid_out("advantages", 0.0),
            mask_BT=trains,
            row_index_BT=owner,
            reference_BT=laid_out("reference", 1e30),
        )
        table = torch.tensor([*weights, 0.0], dtype=dtype)
        loss = policy_loss(batch, weights_BT=table[owner] * trains, objective=objective)
        loss.backward()
        slope = pi.grad
        assert slope is not None
        assert not slope[~trains].any()
        value += float(loss.detach())
        for index in owner.unique().tolist():
            if index >= 0:
                slopes[index] = slope[(owner == index) & trains].double().numpy()
    return value, slopes
