# ruff: noqa: N803, N806 (tensor names end with their shape)
"""Router replay: tokens pass the experts that the sampler chose, with the weights that the trainer's router gives them.

Sampler and trainer compute router logits that differ by rounding, and so sometimes choose other experts, whose outputs
differ by far more. With the sampler's choice I [K] and the trainer's scores s of all E experts the layer is
y = sum over k in I of g(s)_k expert_k(x), where g is what the model does with the scores of its own choice, such as
s_k / sum over I of s. Gradients flow through s into the router, and none through the choice, as without replay.

The choice is made by the only `topk` of K of E numbers in a block of experts, whose answer is replaced. So this holds for every
model of the library whose blocks choose so, and a pass in which a block chose otherwise is an error. Invariant: tokens
whose experts are unknown have the trainer's own.

Legend: B lines, T positions, N = B T tokens, L layers with experts, E experts, K of them for each token.

Source: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid
from fulmen_algorithm.training.engine_mismatch import RoutingDifferences

UNKNOWN = -1
"""Entry of a token whose experts are unknown."""
_TOP_K: tuple[Any, ...] = (torch.topk, Tensor.topk)
_TOP_K_SETTINGS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""Names of K in configurations."""
_DTYPES = {1: torch.uint8, 2: torch.uint16}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ReplayUnsupported(ValueError):
    """A model's experts are not chosen in a way that can be replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlock:
    """A layer's block of experts.

    Attributes:
        block: Chooses and calls the experts.
        experts: What it calls with its choice.
        layer: Index among all layers of the model.
        count: E.
    """

    block: nn.Module
    experts: nn.Module
    layer: int
    count: int


def expert_blocks(model: nn.Module) -> list[ExpertBlock]:
    """Returns the blocks of experts of a model, in order; none if it is not a mixture of experts."""
    found = []
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        count = getattr(experts, "num_experts", None)
        layer = _LAYER.search(f"{name}.")
        if isinstance(experts, nn.Module) and isinstance(count, int) and layer is not None:
            found.append(ExpertBlock(block=block, experts=experts, layer=int(layer[1]), count=count))
    return found


def routed_tensor(records: Sequence[RoutedExperts | None], lengths: Sequence[int]) -> Tensor | None:
    """Returns the experts of tokens of sequences one after the other, `UNKNOWN` where there are none; int32 [T, L, K].

    Args:
        records: Experts of each sequence.
        lengths: Tokens of each sequence.

    Returns:
        None if no sequence has any.

    Raises:
        RoutedExpertsInvalid: if they are of different models.
    """
    forms = {record.form[:2] for record in records if record is not None}
    if not forms:
        return None
    if len(forms) > 1:
        raise RoutedExpertsInvalid(f"Rows have experts of different models, (layers, choices): {sorted(forms)}.")
    routed_TLK = torch.full((sum(lengths), *forms.pop()), UNKNOWN, dtype=torch.int32)
    begin = 0
    for record, length in zip(records, lengths, strict=True):
        if record is not None and record.packed:
            shape = (-1, record.layers, record.top_k)
            # Copied, since the library's tensors may be written to.
            known = torch.frombuffer(bytearray(record.packed), dtype=_DTYPES[record.entry_bytes]).view(shape).int()
            for (start, end), part in zip(
                record.spans, known.split([end - start for start, end in record.spans]), strict=True
            ):
                routed_TLK[begin + start : begin + end] = part
        begin += length
    return routed_TLK


class RouterReplay:
    """Replays recorded experts in the passes of one model; also in those that recompute activations."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepares the blocks of a model, which choose for themselves until `use` is called.

        Raises:
            ReplayUnsupported: if the model has no experts.
        """
        self._blocks = expert_blocks(model)
        config: Any = model.config.get_text_config()
        self._top_k = next((k for name in _TOP_K_SETTINGS if isinstance(k := getattr(config, name, None), int)), 0)
        if not self._blocks:
            raise ReplayUnsupported("Recorded experts cannot be replayed: the model is not a mixture of experts.")
        self._all_layers = int(config.num_hidden_layers)
        self._chosen_LNK: Tensor | None = None
        self._differs_N: Tensor | None = None
        self.differences: RoutingDifferences | None = None
        for place, block in enumerate(self._blocks):
            block.block.forward = self._replaying(place, block)

    def use(self, routed_BTLK: Tensor | None, device: torch.device) -> None:
        """Sets the experts of the tokens of the next passes; None for the trainer's own.

        Raises:
            RoutedExpertsInvalid: with every problem, if they are not those of this model.
        """
        self._note_tokens()
        self._chosen_LNK = None
        if routed_BTLK is not None:
            chosen_NLK = self._of_blocks(routed_BTLK.flatten(0, 1))
            self._chosen_LNK = chosen_NLK.transpose(0, 1).to(device, torch.int64)

    def count(self) -> None:
        """Begins to count differences."""
        self._note_tokens()
        self.differences = RoutingDifferences()

    def counted(self) -> RoutingDifferences:
        """Ends counting, and returns what was counted."""
        self._note_tokens()
        found, self.differences = self.differences or RoutingDifferences(), None
        return found

    def _of_blocks(self, routed_NLK: Tensor) -> Tensor:
        """Returns the entries of the layers with experts, checked."""
        _, layers, top_k = routed_NLK.shape
        problems = []
        if layers not in (len(self._blocks), self._all_layers):
            problems.append(f"{layers} layers, the model {len(self._blocks)} with experts")
        if self._top_k and top_k != self._top_k:
            problems.append(f"{top_k} experts per token and layer, the model {self._top_k}")
        if not problems:
            # vLLM reports all layers, and any number for those without experts.
            if layers != len(self._blocks):
                routed_NLK = routed_NLK[:, [block.layer for block in self._blocks]]
            count = min(block.count for block in self._blocks)
            known_NLK = routed_NLK[routed_NLK[:, 0, 0] != UNKNOWN]
            if known_NLK.numel() and not 0 <= int(known_NLK.min()) <= int(known_NLK.max()) < count:
                problems.append(f"the expert {int(known_NLK.max())}, the model {count}")
            in_order_NLK = known_NLK.sort(-1).values
            if (in_order_NLK[..., 1:] == in_order_NLK[..., :-1]).any():
                problems.append("an expert twice for one token")
        if problems:
            raise RoutedExpertsInvalid(f"Recorded experts do not fit the model. They have {'; '.join(problems)}.")
        return routed_NLK

    def _replaying(self, place: int, block: ExpertBlock) -> Callable[..., Any]:
        own_forward = block.block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._chosen_LNK is None:
                return own_forward(*args, **kwargs)
            with _Answered(self._chosen_LNK[place], block.count) as answered:
                result = own_forward(*args, **kwargs)
            if answered.own_NK is None:
                raise ReplayUnsupported(
                    f"Recorded experts cannot be replayed: {type(block.block).__name__} has no topk."
                )
            if self.differences is not None:
                self._compare(answered.chosen_NK, answered.own_NK)
            return result

        return forward

    def _compare(self, chosen_NK: Tensor, own_NK: Tensor) -> None:
        assert self.differences is not None
        known_N = chosen_NK[:, 0] != UNKNOWN
        other_N = known_N & (chosen_NK.sort(-1).values != own_NK.sort(-1).values).any(-1)
        self.differences.choices += int(known_N.sum())
        self.differences.other_choices += int(other_N.sum())
        self._differs_N = other_N if self._differs_N is None else self._differs_N | other_N

    def _note_tokens(self) -> None:
        """Counts the tokens of the passes so far that differ in any layer."""
        if self.differences is not None and self._differs_N is not None and self._chosen_LNK is not None:
            self.differences.tokens += int((self._chosen_LNK[0, :, 0] != UNKNOWN).sum())
            self.differences.other_tokens += int(self._differs_N.sum())
        self._differs_N = None


class _Answered(TorchFunctionMode):
    """Answers the choice of K of E experts with a recorded one."""

    def __init__(self, chosen_NK: Tensor, experts: int) -> None:
        super().__init__()
        self.chosen_NK, self._experts, self._top_k = chosen_NK, experts, chosen_NK.shape[-1]
        self.own_NK: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return result
        scores_NE: Tensor = args[0]
        # Some choose groups of experts before, from scores by group.
        if scores_NE.dim() != 2 or (scores_NE.shape[-1], result[1].shape[-1]) != (self._experts, self._top_k):
            return result
        if self.own_NK is not None:
            raise ReplayUnsupported("Recorded experts cannot be replayed: a block of experts chooses more than once.")
        self.own_NK = result[1]
        if self.own_NK.shape != self.chosen_NK.shape:
            raise ReplayUnsupported(
                f"Recorded experts cannot be replayed: a block of experts takes {len(self.own_NK)} of"
                f" {len(self.chosen_NK)} tokens."
            )
        indices_NK = torch.where(self.chosen_NK == UNKNOWN, self.own_NK, self.chosen_NK)
        return torch.return_types.topk((scores_NE.gather(-1, indices_NK), indices_NK))
