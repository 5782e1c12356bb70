"""Builds the optimiser of a run: one object of torch's interface, whose state is stored by weight."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fulmen_algorithm.training.settings import AdamW, OptimizerSettings, Sgd
from fulmen_algorithm.training.tensor_parallel import is_split


def make_optimizer(model: PreTrainedModel, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Builds the optimiser over all parameters; but for SGD, matrices decay and vectors (norms, biases) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rule = settings.rule
    if isinstance(rule, Sgd):
        return torch.optim.SGD(groups_alike(parameters), lr=settings.learning_rate, momentum=rule.momentum)
    if isinstance(rule, AdamW):
        return _adamw(parameters, settings, rule)
    tables = _tables(model)
    hidden = [p for p in parameters if p.ndim == 2 and id(p) not in tables]
    those = {id(p) for p in hidden}
    muon = torch.optim.Muon(
        hidden,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=rule.momentum,
        ns_steps=rule.iterations,
        # The rate is then one for AdamW, which the other weights have (arXiv:2502.16982, equation 4).
        adjust_lr_fn="match_rms_adamw",
    )
    others = [p for p in parameters if id(p) not in those]
    return Together([muon, *([_adamw(others, settings, AdamW())] if others else [])])


class Together(torch.optim.Optimizer):
    """Several optimisers, each of its own weights, as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Shares groups and state with `optimizers`, which are not used otherwise."""
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self._optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for each in optimizers:
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure here
        """Takes a step of each."""
        for each in self._optimizers:
            each.step(closure)


def _adamw(parameters: Sequence[nn.Parameter], settings: OptimizerSettings, rule: AdamW) -> torch.optim.AdamW:
    decays, others = ([p for p in parameters if (p.ndim > 1) is wanted] for wanted in (True, False))
    return torch.optim.AdamW(
        [*groups_alike(decays, weight_decay=settings.weight_decay), *groups_alike(others, weight_decay=0.0)],
        lr=settings.learning_rate,
        betas=(rule.beta1, rule.beta2),
        eps=rule.epsilon,
        fused=rule.fused or None,
    )


def groups_alike(parameters: Sequence[nn.Parameter], **options: float) -> list[dict[str, Any]]:
    """Returns groups of weights with the same placement: torch's steps accept only such groups."""
    split, others = ([p for p in parameters if is_split(p) is wanted] for wanted in (True, False))
    return [{"params": one, **options} for one in (split, others) if one]


def _tables(model: PreTrainedModel) -> set[int]:
    """Returns the ids of the matrices that are tables of tokens: input and output embeddings."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return {id(module.weight) for module in modules if isinstance(getattr(module, "weight", None), Tensor)}
