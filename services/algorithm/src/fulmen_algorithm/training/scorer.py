# ruff: noqa: N803, N806, N815 (tensor names end with their shape)
"""Log-probabilities of given tokens as a module: the unit of sharding, with bounded memory.

Logits are the largest tensor of training: V numbers for each position. They are computed only for the requested
positions, in pieces, and recomputed in the backward pass, so that only one piece is held at a time.
Invariant: logits are divided by the temperature and normalised in float32.

Legend: B lines, T positions, N requested positions, V vocabulary, D width.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fulmen_algorithm.training.context_parallel import ContextSplit, ContextUnsupported
from fulmen_algorithm.training.heads import AFTER_HEAD, LOGITS_AT_ONCE, setting_after_head
from fulmen_algorithm.training.token_entropy import entropy_of
from fulmen_exchange.ranks import Ranks

_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
_RELATIVE_IN_BF16 = 0.05
_LEAK = 1e-5
"""Largest difference that counts as rounding, relative to the largest logit: experts make 3e-7 (measured), a convolution
of an untrained model leaks 4e-4."""
_LARGE = 1000.0
"""Logits that no cap leaves as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Traits of a model, determined by trial.

    Attributes:
        plain_head: Whether logits are the output embedding applied to the decoder's last state, and nothing more.
        packs: Whether rows of a line do not attend to each other.
    """

    plain_head: bool
    packs: bool


class TokenScores(NamedTuple):
    """Scores of the tokens of a micro-batch.

    Attributes:
        logprobs_BT: float32; 0.0 where a token was not requested.
        entropy_BT: Entropy of the distribution from which the token was drawn, in nats, alike; None if not requested.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor | None = None


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

    @torch.no_grad()
    def try_out_split(self, ranks: Ranks, *, bf16: bool) -> None:
        """Compares a line that is split by positions with a whole one; called by all ranks that share weights or rows.

        Args:
            ranks: Those over which it is split.
            bf16: Whether this is computed in bf16.

        Raises:
            ContextUnsupported: if they differ, on every rank alike.
        """
        weight: Any = self.model.get_input_embeddings().weight
        length = 8 * ranks.world_size + 3
        line_BT = torch.tensor([[(7 * n + 3) % int(weight.shape[0]) for n in range(length)]], device=ranks.device)
        cuts = (3, length // 2, length) if self.traits.packs else (length,)
        starts = (0, *cuts[:-1])
        positions_BT = torch.tensor([[n for a, b in zip(starts, cuts, strict=True) for n in range(b - a)]])
        positions_BT = positions_BT.to(ranks.device)
        inputs = (line_BT, positions_BT, None, torch.ones_like(line_BT, dtype=torch.bool), 1.0, False)
        whole_BT = self(*inputs).logprobs_BT
        try:
            found_BT = self(*inputs, ContextSplit(ranks, positions_BT, None)).logprobs_BT
        except (AttributeError, TypeError) as error:
            raise ContextUnsupported(
                f"Rows cannot be split by positions: the model's masks are changed: {error}"
            ) from error
        changed = float((found_BT - whole_BT).abs().max() / whole_BT.abs().max())
        # GPUs may round more, by the kernel of an attention with a mask.
        if not changed <= (_RELATIVE_IN_BF16 if bf16 else _LEAK if ranks.device.type == "cpu" else _RELATIVE):
            raise ContextUnsupported(
                "Rows cannot be split by positions: the model's results differ, so positions meet otherwise than in attention."
            )

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        attention_mask_BT: Tensor | None,
        asked_BT: Tensor,
        temperature: float,
        entropy: bool = False,
        split: ContextSplit | None = None,
    ) -> TokenScores:
        """Computes log p(token | tokens before it in its row) where `asked_BT` is true, and 0.0 elsewhere.

        With `entropy` also the entropy of p(. | tokens before it in its row). With `split` the model computes this rank's
        positions, and the result is that of all.

        Returns:
            float32 [B, T]; 0.0 at t = 0.
        """
        targets_BT, asked_BT = _next(input_ids_BT), _next(asked_BT)
        if split is not None:
            given = (input_ids_BT, position_ids_BT, targets_BT, asked_BT)
            input_ids_BT, position_ids_BT, targets_BT, asked_BT = map(split.take, given)
            # The model's masks are made of the whole one (`ContextSplit.mask`).
            attention_mask_BT = torch.ones_like(input_ids_BT)
        inputs = {"position_ids": position_ids_BT, "attention_mask": attention_mask_BT, "use_cache": False}
        targets_N = targets_BT[asked_BT]
        with nullcontext() if split is None else split.in_use():
            if self.traits.plain_head:
                decoder, head = parts_of(self.model)
                states_BTD = decoder(input_ids=input_ids_BT, **inputs).last_hidden_state
                found_N = _in_pieces(states_BTD[asked_BT], targets_N, head, temperature, entropy=entropy)
            else:
                logits_BTV = self.model(input_ids=input_ids_BT, **inputs).logits
                found_N = _pick(logits_BTV[asked_BT], targets_N, temperature, entropy=entropy)
        return TokenScores(*(one_later(_spread(values_N, asked_BT), split) for values_N in found_N))


def _next(values_BT: Tensor) -> Tensor:
    """Returns what there is of the next token at each position; 0 at the last."""
    return torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], dim=1)


def one_later(values_BT: Tensor, split: ContextSplit | None) -> Tensor:
    """Puts values one position later than the states that they come from; with `split` those of all ranks."""
    whole_BT = values_BT if split is None else split.join(values_BT)
    return nn.functional.pad(whole_BT[:, :-1], (1, 0))


def _spread(values_N: Tensor, asked: Tensor) -> Tensor:
    """Puts values where they were requested."""
    return torch.zeros(asked.shape, dtype=torch.float32, device=asked.device).masked_scatter(asked, values_N)


def _in_pieces(
    states_ND: Tensor, targets_N: Tensor, head: nn.Module, temperature: float, *, entropy: bool
) -> tuple[Tensor, ...]:
    size = max(1, LOGITS_AT_ONCE // _width(head))
    if len(states_ND) <= size:
        return _score(states_ND, targets_N, head, temperature, entropy=entropy)
    pieces = []
    for states, targets in zip(states_ND.split(size), targets_N.split(size), strict=True):
        if torch.is_grad_enabled():
            # Logits are discarded and recomputed in the backward pass.
            found = checkpoint(_score, states, targets, head, temperature, entropy=entropy, use_reentrant=False)
            pieces.append(found)
        else:
            pieces.append(_score(states, targets, head, temperature, entropy=entropy))
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def _score(
    states_ND: Tensor, targets_N: Tensor, head: nn.Module, temperature: float, *, entropy: bool
) -> tuple[Tensor, ...]:
    return _pick(head(states_ND), targets_N, temperature, entropy=entropy)


def _pick(logits_NV: Tensor, targets_N: Tensor, temperature: float, *, entropy: bool) -> tuple[Tensor, ...]:
    """Returns the log-probability of each target, and with `entropy` that of its distribution."""
    logits_NV = logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    # The same as a log-softmax, without a second tensor of V numbers for each position.
    normaliser_N = logits_NV.logsumexp(-1)
    picked_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - normaliser_N
    return (picked_N, entropy_of(logits_NV, normaliser_N)) if entropy else (picked_N,)


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
    """Determines the traits of a model by its configuration and short passes: some scale or cap their logits, or mix rows."""
    embeddings: Any = model.get_input_embeddings()
    limit = int(embeddings.weight.shape[0])
    line = torch.tensor([[(7 * n + 3) % limit for n in range(8)]], device=model.device)
    # Three rows in one line.
    cuts = ((0, 3), (3, 7), (7, 8))
    positions = torch.tensor([[n for a, b in cuts for n in range(b - a)]], device=model.device)
    logits = model(input_ids=line, position_ids=positions, use_cache=False).logits
    return ModelTraits(
        plain_head=_has_plain_head(model, line, positions, logits), packs=_packs(model, line, positions, cuts, logits)
    )


def _packs(
    model: PreTrainedModel, line: Tensor, positions: Tensor, cuts: Sequence[tuple[int, int]], logits: Tensor
) -> bool:
    alone = [model(input_ids=line[:, a:b], use_cache=False).logits for a, b in cuts]
    if not _close(logits, torch.cat(alone, dim=1)):
        return False
    first, limit = cuts[0][1], int(line.max()) + 1
    others = torch.cat([line[:, :first].roll(1, dims=1), line[:, first:]], dim=1)
    leaked = _difference(model, others, positions, logits, slice(first, None))
    if not leaked:
        return True
    # An untrained model's rows may leak only slightly, so any difference counts, unless the model's results depend on
    # what else is in the pass: those of experts do, as their tokens are computed in groups. No model looks ahead, and
    # so a difference that later tokens make is one of rounding.
    others = torch.cat([line[:, :first], (line[:, first:] + 1) % limit], dim=1)
    rounding = _difference(model, others, positions, logits, slice(0, first))
    if logits.dtype is not torch.float32 and any(isinstance(part, nn.Conv1d) for part in model.modules()):
        # What a convolution of an untrained model leaks is less than the rounding of bf16.
        return False
    return rounding > 0 and leaked <= (_LEAK if logits.dtype is torch.float32 else _RELATIVE_IN_BF16)


def _difference(model: PreTrainedModel, line: Tensor, positions: Tensor, logits: Tensor, where: slice) -> float:
    """Returns the largest change of logits at some positions that another line makes, relative to the largest logit."""
    others = model(input_ids=line, position_ids=positions, use_cache=False).logits
    changed = (others - logits)[:, where].abs().max()
    return float(changed / logits.abs().max()) if changed else 0.0


def _has_plain_head(model: PreTrainedModel, line: Tensor, positions: Tensor, logits: Tensor) -> bool:
    config: Any = model.config.get_text_config()
    if setting_after_head({name: getattr(config, name, None) for name in AFTER_HEAD}):
        return False
    try:
        decoder, head = parts_of(model)
        states = decoder(input_ids=line, position_ids=positions, use_cache=False).last_hidden_state
        if not _close(head(states), logits):
            return False
        # Logits of a fresh model are so small that a cap hardly changes them.
        large = torch.linspace(-_LARGE, _LARGE, logits.shape[-1], device=logits.device, dtype=logits.dtype)
        hook = head.register_forward_hook(lambda module, inputs, output: large.expand_as(output).clone())
        try:
            after_head = model(input_ids=line, position_ids=positions, use_cache=False).logits
        finally:
            hook.remove()
        return _close(after_head, large.expand_as(after_head))
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
