# ruff: noqa: N803, N806 (tensor names end with their shape)
"""Log-probabilities of given tokens as a module: the unit of sharding, with bounded memory.

Logits are the largest tensor of training: V numbers for each position. They are computed only for the requested
positions, in pieces, and recomputed in the backward pass, so that only one piece is held at a time.
Invariant: logits are divided by the temperature and normalised in float32.

Legend: B lines, T positions, N requested positions, V vocabulary, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

LOGITS_AT_ONCE = 2**25
"""Maximum number of logits in one piece, 128 MiB in float32."""
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
_RELATIVE_IN_BF16 = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Traits of a model, determined by trial.

    Attributes:
        plain_head: Whether logits are the output embedding applied to the decoder's last state, and nothing more.
        packs: Whether rows of a line do not attend to each other.
    """

    plain_head: bool
    packs: bool


class TokenScorer(nn.Module):
    """Scores tokens with a causal language model; the forward pass of training."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Scores once `try_out` was called."""
        super().__init__()
        self.model = model
        self.traits = ModelTraits(plain_head=False, packs=False)

    def try_out(self) -> None:
        """Determines the model's traits. Like `forward`, it is called by all ranks that hold parts of the model."""
        self.traits = try_out(self.model)

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        attention_mask_BT: Tensor | None,
        asked_BT: Tensor,
        temperature: float,
    ) -> Tensor:
        """Computes log p(token | tokens before it in its row) where `asked_BT` is true, and 0.0 elsewhere.

        Returns:
            float32 [B, T]; 0.0 at t = 0.
        """
        inputs = {"position_ids": position_ids_BT, "attention_mask": attention_mask_BT, "use_cache": False}
        asked, targets_N = asked_BT[:, 1:], input_ids_BT[:, 1:][asked_BT[:, 1:]]
        if self.traits.plain_head:
            decoder, head = parts_of(self.model)
            states_BTD = decoder(input_ids=input_ids_BT, **inputs).last_hidden_state
            picked_N = _in_pieces(states_BTD[:, :-1][asked], targets_N, head, temperature)
        else:
            logits_BTV = self.model(input_ids=input_ids_BT, **inputs).logits
            picked_N = _pick(logits_BTV[:, :-1][asked], targets_N, temperature)
        picked_BT = torch.zeros(asked.shape, dtype=torch.float32, device=asked.device).masked_scatter(asked, picked_N)
        return nn.functional.pad(picked_BT, (1, 0))


def _in_pieces(states_ND: Tensor, targets_N: Tensor, head: nn.Module, temperature: float) -> Tensor:
    size = max(1, LOGITS_AT_ONCE // _width(head))
    if len(states_ND) <= size:
        return _score(states_ND, targets_N, head, temperature)
    pieces = []
    for states, targets in zip(states_ND.split(size), targets_N.split(size), strict=True):
        if torch.is_grad_enabled():
            # Logits are discarded and recomputed in the backward pass.
            pieces.append(checkpoint(_score, states, targets, head, temperature, use_reentrant=False))
        else:
            pieces.append(_score(states, targets, head, temperature))
    return torch.cat(pieces)


def _score(states_ND: Tensor, targets_N: Tensor, head: nn.Module, temperature: float) -> Tensor:
    return _pick(head(states_ND), targets_N, temperature)


def _pick(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
    logits_NV = logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    # The same as a log-softmax, without a second tensor of V numbers for each position.
    return logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - logits_NV.logsumexp(-1)


def _width(head: nn.Module) -> int:
    weight = getattr(head, "weight", None)
    # A head wrapped by adapters; its width only determines the number of chunks.
    return int(weight.shape[0]) if isinstance(weight, Tensor) else int(getattr(head, "out_features", LOGITS_AT_ONCE))


def parts_of(model: PreTrainedModel) -> tuple[Callable[..., Any], nn.Module]:
    """Returns a model's decoder and its head, adapters included.

    Raises:
        AttributeError: if it has no decoder or head under the usual names.
    """
    # A wrapper of adapters delegates to the inner model, whose layers it has replaced.
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    return inner.get_decoder(), inner.get_output_embeddings()


@torch.no_grad()
def try_out(model: PreTrainedModel) -> ModelTraits:
    """Determines the traits of a model by short passes: some scale or cap their logits, or mix rows of a line."""
    embeddings: Any = model.get_input_embeddings()
    limit = int(embeddings.weight.shape[0])
    ids = [(7 * n + 3) % limit for n in range(8)]
    # Three rows in one line, and each by itself.
    cuts = ((0, 3), (3, 7), (7, 8))
    line = torch.tensor([ids], device=model.device)
    positions = torch.tensor([[n for a, b in cuts for n in range(b - a)]], device=model.device)
    packed = model(input_ids=line, position_ids=positions, use_cache=False).logits
    alone = [model(input_ids=line[:, a:b], use_cache=False).logits for a, b in cuts]
    # Exact comparison: an untrained model's attention may leak only slightly between rows.
    line_2 = torch.cat([line[:, : cuts[0][1]].roll(1, dims=1), line[:, cuts[0][1] :]], dim=1)
    packed_2 = model(input_ids=line_2, position_ids=positions, use_cache=False).logits
    packs = _close(packed, torch.cat(alone, dim=1)) and torch.equal(packed[:, cuts[0][1] :], packed_2[:, cuts[0][1] :])
    return ModelTraits(plain_head=_has_plain_head(model, line, positions, packed), packs=packs)


def _has_plain_head(model: PreTrainedModel, line: Tensor, positions: Tensor, logits: Tensor) -> bool:
    try:
        decoder, head = parts_of(model)
        states = decoder(input_ids=line, position_ids=positions, use_cache=False).last_hidden_state
        return _close(head(states), logits)
    except (AttributeError, TypeError, RuntimeError):
        # Another model structure; use its own forward pass.
        return False


def _close(some: Tensor, others: Tensor) -> bool:
    if some.dtype is torch.float32:
        return torch.allclose(some, others, rtol=_RELATIVE, atol=_ABSOLUTE)
    # A model in parts is tried out in the precision of its passes, where small logits are mostly rounding.
    return bool((some.float() - others.float()).norm() <= _RELATIVE_IN_BF16 * others.float().norm())


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns a model's repeated blocks; the units of checkpointing and sharding."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Enables gradient checkpointing: each layer is recomputed in the backward pass.

    The library does so only in training mode, which also enables dropout; so only the layers themselves are put into
    training mode, not their submodules, and their own dropout is set to 0.
    """
    # The newer of the library's two names, if available.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in layers_of(model):
        layer.training = True
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def compile_layers(model: nn.Module) -> None:
    """Has each layer compiled at its first pass, for lines of any length; names of weights stay."""
    for layer in layers_of(model):
        layer.compile(dynamic=True)
