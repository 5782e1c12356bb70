# ruff: noqa: N803, N806 (tensor names end with their shape)
"""The critic of PPO: estimates the remaining return at every token, to compute the advantages of a batch.

It is a copy of the policy's trunk with a value head (`AutoModelForTokenClassification`), on the policy's device or another one,
with a separate optimiser. Every rank holds all of it, or with `fsdp2` a part, as of the policy. The head starts at 0, so the
first advantages are the returns themselves. Invariant: a step whose loss or gradient norm is not finite, or whose gradient
explodes, changes nothing, and every copy of the critic has the same weights.

Legend: B lines, T positions, N trained tokens of a rollout in the order in which they were sampled.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging

from fulmen_algorithm.losses.advantage_settings import CriticPlan
from fulmen_algorithm.losses.advantages import Floats, discounted_sums, whitened
from fulmen_algorithm.training.compute import Fsdp2
from fulmen_algorithm.training.context_parallel import split_of, split_positions
from fulmen_algorithm.training.defaults import CRITIC_RATE
from fulmen_algorithm.training.gradient_norms import clip_gradients
from fulmen_algorithm.training.optimizer import NormWatch
from fulmen_algorithm.training.optimizers import groups_alike
from fulmen_algorithm.training.packing import MicroBatch, empty_micro_batch, micro_batch
from fulmen_algorithm.training.parallel import (
    AllReduce,
    RankGroups,
    autocast,
    layouts_of,
    shard,
    spread_again,
)
from fulmen_algorithm.training.part_loading import load_part
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.scorer import layers_of, one_later
from fulmen_algorithm.training.settings import PackingMode
from fulmen_algorithm.training.tensor_parallel import agree_on_gradients, load_split
from fulmen_exchange.ranks import Ranks, StepInfo


def generalised_advantages(rewards_N: Floats, values_N: Floats, *, gamma: float, lam: float) -> Floats:
    """Computes A_t = sum over l of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t; V is 0 at the end.

    Source: generalised advantage estimation (arXiv:1506.02438) equation 16.
    """
    delta_N = rewards_N + gamma * np.append(values_N[1:], 0.0)[: len(values_N)] - values_N
    return discounted_sums(delta_N, gamma * lam)


def value_loss(values: Tensor, old: Tensor, targets: Tensor, *, clip: float | None) -> Tensor:
    """Computes half the squared error of each value, or of the value clipped to near the old one if that is larger.

    Source: the value loss of PPO2 (github.com/openai/baselines), as "What matters in on-policy RL?" (arXiv:2006.05990)
    describes it.
    """
    error = (values - targets).square()
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (near - targets).square())
    return error / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTargets:
    """Regression targets of the critic for a batch.

    Attributes:
        rows: The batch's rows, now with advantages.
        values: Values predicted at each token.
        targets: Value targets: advantage plus value.
    """

    rows: tuple[Row, ...]
    values: tuple[tuple[float, ...], ...]
    targets: tuple[tuple[float, ...], ...]


class Critic:
    """Values and their optimiser."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: CriticPlan,
        *,
        ranks: Ranks,
        groups: RankGroups | None = None,
        pad_token_id: int,
        bf16: bool = False,
    ) -> None:
        """Wraps a model with one output for each token, whole or in parts already; see `load`."""
        self.model = model.eval()
        self.groups = groups or RankGroups(copy=Ranks(device=ranks.device), peers=ranks)
        rate = plan.critic.learning_rate or CRITIC_RATE.of(sum(each.numel() for each in model.parameters()))
        self.optimizer = torch.optim.AdamW(groups_alike(list(model.parameters())), lr=rate, weight_decay=0.0)
        self._plan = plan
        self._ranks = ranks
        self._device = ranks.device if self._sharded else model.device
        self._pad_token_id = pad_token_id
        self._bf16 = bf16
        self._norms = NormWatch()

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        plan: CriticPlan,
        *,
        ranks: Ranks,
        groups: RankGroups | None = None,
        parallel: Fsdp2 | None = None,
        device: str | None = None,
        pad_token_id: int,
        bf16: bool = False,
    ) -> "Critic":
        """Copies the trunk of a policy; the head, which the folder lacks, starts at 0.

        Args:
            model_dir: Folder of the policy.
            plan: Settings.
            ranks: Ranks that train.
            groups: Those of the policy, over which the critic is spread likewise; None if each rank holds all of it.
            parallel: How it is spread.
            device: Where a whole critic is to be; None for the ranks' device.
            pad_token_id: Id for padding.
            bf16: Whether passes compute in bf16.

        Raises:
            OSError: if the folder holds no model.
            ValueError: if the library has no token classifier of this architecture.
        """
        groups = groups or RankGroups(copy=Ranks(device=ranks.device), peers=ranks)
        model = _with_fresh_head(model_dir, groups)
        if groups.mesh is None or groups.tensor_mesh is not None:
            model.to(device or ranks.device)  # type: ignore[arg-type]  # the library's wrapper hides the signature
        if groups.context.group is not None:
            split_positions(model)
        if groups.mesh is not None and parallel is not None:
            shard(model, layers_of(model), groups.mesh, parallel, bf16=bf16)
        return cls(model, plan, ranks=ranks, groups=groups, pad_token_id=pad_token_id, bf16=bf16)

    @property
    def _sharded(self) -> bool:
        return self.groups.mesh is not None

    def assess(self, rows: Sequence[Row], *, token_budget: int, mode: PackingMode) -> CriticTargets:
        """Computes advantages and value targets from the rewards of rows."""
        values = self._values(rows, token_budget=token_budget, mode=mode)
        advantages = [np.zeros(len(row.token_ids)) for row in rows]
        chains = _chains(rows)
        for places in chains:
            rewards_N = np.array([rows[r].rewards[t] if rows[r].rewards else 0.0 for r, t in places])
            values_N = np.array([values[r][t] for r, t in places])
            settings = self._plan.advantage
            found_N = generalised_advantages(rewards_N, values_N, gamma=settings.gamma, lam=settings.lam)
            for (r, t), advantage in zip(places, found_N, strict=True):
                advantages[r][t] = advantage
        targets = tuple(
            tuple(float(a) + v for a, v in zip(own, old, strict=True))
            for own, old in zip(advantages, values, strict=True)
        )
        if self._plan.advantage.whiten and chains:
            everything = [place for places in chains for place in places]
            for (r, t), advantage in zip(
                everything, whitened(np.array([advantages[r][t] for r, t in everything])), strict=True
            ):
                advantages[r][t] = advantage
        judged = (replace(row, advantages=tuple(own.tolist())) for row, own in zip(rows, advantages, strict=True))
        return CriticTargets(rows=tuple(judged), values=tuple(tuple(v) for v in values), targets=targets)

    def learn(
        self,
        critic_targets: CriticTargets,
        indices: Sequence[int],
        *,
        token_budget: int,
        mode: PackingMode,
        explosion_factor: float | None = None,
    ) -> dict[str, float]:
        """Takes one step on a minibatch, unless its gradient explodes; returns its metrics."""
        rows = [critic_targets.rows[i] for i in indices]
        tokens = sum(row.trained_tokens for row in rows)
        loss = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self._micro_batches(rows, token_budget=token_budget, mode=mode):
            device = self._device
            mask_BT = micro.loss_mask_BT.to(device)
            old_BT = _laid_out(micro, [critic_targets.values[i] for i in indices]).to(device)
            targets_BT = _laid_out(micro, [critic_targets.targets[i] for i in indices]).to(device)
            errors_BT = value_loss(self._values_of(micro), old_BT, targets_BT, clip=self._plan.critic.clip)
            part = torch.where(mask_BT, errors_BT, 0.0).sum() / max(tokens, 1)
            part.backward()
            loss += float(part.detach())
        parameters = list(self.model.parameters())
        agree_on_gradients(self.model, self.groups.tensor)
        AllReduce().reduce(parameters, self.groups.peers, StepInfo())
        norm = clip_gradients(parameters, self._plan.critic.max_grad_norm, self.groups)
        measured = self._ranks.gather((loss, norm))[self.groups.once]
        loss = sum(one for one, _ in measured)
        # The numbers are the same on every rank, so all take or skip the step alike.
        exploded = self._norms.explodes(measured[0][1], explosion_factor)
        finite = math.isfinite(loss) and all(math.isfinite(one) for _, one in measured)
        skipped = not (tokens and finite) or exploded
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "value_loss": loss,
            "value_grad_norm": norm,
            "value_skipped": float(skipped),
            "value_exploded": float(exploded),
            "value_explained": _explained(rows, critic_targets, indices),
        }

    @property
    def norms(self) -> list[float]:
        """The gradient norms of the last steps, newest last."""
        return self._norms.norms

    @norms.setter
    def norms(self, norms: Sequence[float]) -> None:
        self._norms = NormWatch(norms)

    @torch.no_grad()
    def _values(self, rows: Sequence[Row], *, token_budget: int, mode: PackingMode) -> list[list[float]]:
        found: dict[int, list[float]] = {}
        for micro in self._micro_batches(rows, token_budget=token_budget, mode=mode):
            values = self._values_of(micro).flatten().tolist()
            for index, value in zip(micro.row_index_BT.flatten().tolist(), values, strict=True):
                if index >= 0:
                    found.setdefault(index, []).append(value)
        everything = {index: values for part in self._ranks.gather(found) for index, values in part.items()}
        return [everything[index] for index in range(len(rows))]

    def _values_of(self, micro: MicroBatch) -> Tensor:
        """Computes V before each token, the value of the state in which it was sampled; float32 [B, T]."""
        device = self._device
        ids_BT, positions_BT = micro.input_ids_BT.to(device), micro.position_ids_BT.to(device)
        attention = None if micro.attention_mask_BT is None else micro.attention_mask_BT.to(device)
        if (split := split_of(self.groups.context, positions_BT, attention)) is not None:
            ids_BT, positions_BT = split.take(ids_BT), split.take(positions_BT)
            attention = torch.ones_like(ids_BT)
        with (
            autocast(device, bf16=self._bf16 and not self._sharded),
            nullcontext() if split is None else split.in_use(),
        ):
            output = self.model(input_ids=ids_BT, position_ids=positions_BT, attention_mask=attention, use_cache=False)
        if self._sharded and not torch.is_grad_enabled():
            # There is no backward pass for which the root keeps its weights gathered.
            spread_again(self.model)
        return one_later(output.logits[..., 0].float(), split)

    def _micro_batches(self, rows: Sequence[Row], *, token_budget: int, mode: PackingMode) -> list[MicroBatch]:
        ranks, of_copy = self.groups.sharing(self._ranks)
        shares = layouts_of(rows, ranks, token_budget=token_budget, mode=mode)
        mine, pad = shares[ranks.rank], self._pad_token_id
        # Every pass involves all ranks of a copy.
        missing = max(map(len, shares[of_copy])) - len(mine)
        made = [micro_batch(rows, layout, pad_token_id=pad, mode=mode) for layout in mine]
        return made + [empty_micro_batch(pad_token_id=pad)] * missing


def _with_fresh_head(model_dir: Path | str, groups: RankGroups) -> PreTrainedModel:
    options: dict[str, Any] = {"num_labels": 1, "output_loading_info": True}
    verbosity = logging.get_verbosity()
    # Silence the warning that the head is not in the folder.
    logging.set_verbosity_error()
    try:
        model: PreTrainedModel
        found: Mapping[str, Any]
        kind = AutoModelForTokenClassification
        if groups.tensor_mesh is not None:
            model, found = load_split(model_dir, groups.tensor_mesh, kind=kind, **options)
        elif groups.mesh is not None:
            model, found = load_part(model_dir, groups.mesh, kind=kind, **options)
        else:
            model, found = kind.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    head = set(found["missing_keys"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in head:
                parameter.zero_()
    return model


def _chains(rows: Sequence[Row]) -> list[list[tuple[int, int]]]:
    """Lists the trained tokens of each rollout, as (row, position), in the order in which they were sampled."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for index, row in enumerate(rows):
        for position, trains in enumerate(row.loss_mask):
            if trains:
                step = row.steps[position] if row.steps else 0
                found.setdefault(row.rollout_id, []).append((step, index, position))
    return [[(row, position) for _, row, position in sorted(places)] for places in found.values()]


def _laid_out(micro: MicroBatch, values: Sequence[Sequence[float]]) -> Tensor:
    """Lays per-token values of rows out like a micro-batch; 0 at padding."""
    # Tokens of a row are in order, so the next value of the row is that of its next token.
    taken = [iter(own) for own in values]
    flat = [next(taken[row]) if row >= 0 else 0.0 for row in micro.row_index_BT.flatten().tolist()]
    return torch.tensor(flat, dtype=torch.float32).view(micro.row_index_BT.shape)


def _explained(rows: Sequence[Row], critic_targets: CriticTargets, indices: Sequence[int]) -> float:
    """Computes the explained variance of the targets before the step; 0 if they have no variance."""
    pairs = [
        (critic_targets.values[i][t], critic_targets.targets[i][t])
        for row, i in zip(rows, indices, strict=True)
        for t, trains in enumerate(row.loss_mask)
        if trains
    ]
    values, targets = np.array(pairs).reshape(-1, 2).T
    if not pairs or not np.isfinite(targets).all():
        return 0.0
    variance = float(targets.var())
    return 1.0 - float((targets - values).var()) / variance if variance > 0 else 0.0
