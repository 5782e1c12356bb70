"""The shape of a language model, read from its `config.json`; parameters are counted from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["ModelShape", "ShapeUnknown"]

# The same number under the names that kinds of models give it.
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head")
_INNER: Final = ("intermediate_size", "n_inner", "ffn_dim")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
# Without a gate between two projections, as in GPT-2.
_UNGATED: Final = frozenset({"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "starcoder2"})
_QKV_BIASES: Final = frozenset({"qwen2", "qwen2_moe"})
_HEAD_NORMS: Final = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
_MOST: Final = 10**9


class ShapeUnknown(Exception):
    """A configuration has not the numbers that are needed; the text names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        hidden: Width of the residual stream, D.
        layers: Number of layers, L.
        heads: Query heads.
        key_heads: Heads of keys and values; fewer than `heads` with grouped queries.
        head: Width of a head.
        inner: Width within the MLP, or within one expert.
        vocabulary: Tokens, V.
        tied: Whether the output embedding is the input embedding.
        experts: Experts in a layer; 0 without.
        active_experts: Those that a token passes, shared ones included.
        shared_experts: Those that every token passes.
        gated: Whether the MLP has three matrices, as SwiGLU, or two.
        longest: Maximum number of tokens of a sequence; 0 if unknown.
        head_norms: Whether queries and keys are normalised.
        small: Parameters of a layer that are not matrices: norms and biases.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int
    inner: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    gated: bool = True
    longest: int = 0
    head_norms: bool = False
    small: int = 0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelShape:
        """Reads a `config.json`; of a model of several kinds of input, its part for text.

        Raises:
            ShapeUnknown: if numbers are missing or impossible.
        """
        if isinstance(config.get("text_config"), Mapping):
            config = {**config, **config["text_config"]}
        kind = str(config.get("model_type", ""))
        missing: list[str] = []
        hidden, layers, heads = (_number(config, names, missing) for names in (_HIDDEN, _LAYERS, _HEADS))
        vocabulary = _number(config, ("vocab_size",), missing)
        inner = _number(config, _INNER, [], 4 * hidden)
        if missing:
            raise ShapeUnknown(f"the configuration has no {', '.join(missing)}")
        experts = _number(config, _EXPERTS, [], 0)
        shared = _number(config, ("n_shared_experts",), [], 0) if experts else 0
        key_heads = _number(config, ("num_key_value_heads",), [], heads)
        head = _number(config, ("head_dim",), [], hidden // heads)
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            key_heads=key_heads,
            head=head,
            inner=_number(config, ("moe_intermediate_size",), [], inner) if experts else inner,
            vocabulary=vocabulary,
            tied=bool(config.get("tie_word_embeddings", kind in ("gpt2", "gemma", "gemma2", "gemma3_text"))),
            experts=experts,
            active_experts=_number(config, ("num_experts_per_tok",), [], experts) + shared if experts else 0,
            shared_experts=shared,
            gated=kind not in _UNGATED,
            longest=_number(config, ("max_position_embeddings", "n_positions"), [], 0),
            head_norms=kind in _HEAD_NORMS,
            small=2 * hidden
            + (2 * head if kind in _HEAD_NORMS else 0)
            + ((heads + 2 * key_heads) * head if kind in _QKV_BIASES else 0),
        )

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear layers of one attention: queries, keys, values, output."""
        queries, keys = self.heads * self.head, self.key_heads * self.head
        return (self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)

    @property
    def inner_matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the linear layers of one MLP, or of one expert."""
        into, out = (self.hidden, self.inner), (self.inner, self.hidden)
        return (into, into, out) if self.gated else (into, out)

    @property
    def blocks(self) -> int:
        """MLPs in a layer: 1, or all experts."""
        return self.experts + self.shared_experts if self.experts else 1

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        router = self.hidden * self.experts
        return _products(self.attention_matrices) + self.blocks * _products(self.inner_matrices) + router + self.small

    @property
    def split_parameters(self) -> int:
        """Parameters that tensor parallelism splits: the matrices of attention and MLPs."""
        return self.layers * (_products(self.attention_matrices) + self.blocks * _products(self.inner_matrices))

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the matrices of layers, routers included. Experts are none: the library stacks them."""
        inner = _products(self.inner_matrices) * (self.shared_experts if self.experts else 1)
        return self.layers * (_products(self.attention_matrices) + inner + self.hidden * self.experts)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of every linear layer (arXiv:2106.09685, section 4.1): r · (inputs + outputs) each."""
        matrices = (*self.attention_matrices, *(self.inner_matrices * self.blocks))
        return self.layers * rank * sum(into + out for into, out in matrices)


def _products(matrices: tuple[tuple[int, int], ...]) -> int:
    return sum(into * out for into, out in matrices)


def _number(config: Mapping[str, Any], names: tuple[str, ...], missing: list[str], default: int | None = None) -> int:
    """Returns the first of some entries that is a number, otherwise the default."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            if not 0 < value <= _MOST:
                raise ShapeUnknown(f"{name} is {value}")
            return value
    if default is None:
        missing.append(names[0])
        return 1
    return default
