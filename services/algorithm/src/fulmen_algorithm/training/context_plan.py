"""Which models context parallelism can split by positions. Importable without torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_MIXED_BY_ATTENTION = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers whose positions meet in attention alone, by a mask that the library knows; `attention` is an older name."""
_MIXING = (
    "attn_temperature_tuning",  # Llama 4
    "conv_L_cache",  # LFM2
    "conv_kernel",  # Mamba
    "linear_conv_kernel_dim",  # Qwen3-Next
    "mamba_d_conv",  # Jamba, Bamba, Falcon H1
    "conv1d_width",  # RecurrentGemma
    "lru_width",
    "attention_hidden_size",  # RWKV
    "index_topk",  # DeepSeek's sparse attention
)
"""Settings of models with convolutions, recurrences, or a choice of positions, in layers of whatever name."""
_ROPES_OF_LENGTH = {"dynamic", "longrope", "su"}
"""Rotary embeddings whose frequencies depend on the longest position of a pass; `su` is an older name of `longrope`."""


def context_problems(config: Mapping[str, Any]) -> list[str]:
    """Returns why the rows of a model cannot be split by positions, as far as its configuration says it.

    Args:
        config: The model's configuration, as in `config.json`.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    kinds = sorted({*map(str, text.get("layer_types") or text.get("layers_block_type") or ())} - _MIXED_BY_ATTENTION)
    found = [f"the model has layers of kind {kind}, which mix positions otherwise than by attention" for kind in kinds]
    found += [
        f"the model has {name}: its layers mix positions otherwise than by attention"
        for name in _MIXING
        if text.get(name) and not kinds
    ]
    found += [
        f"the model's rotary embeddings are of type {kind}, which depends on the longest position of a pass"
        for kind in sorted({*_ropes(text)} & _ROPES_OF_LENGTH)
    ]
    return [f"context: {problem}" for problem in found]


def context_folder_problems(model_dir: Path) -> list[str]:
    """Returns the same of the model in a folder; blocks. Nothing is said of one that cannot be read: its trainer says why."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return []
    return context_problems(config) if isinstance(config, Mapping) else []


def _ropes(config: Mapping[str, Any]) -> Iterable[str]:
    """Lists the types of rotary embeddings; they may be set for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if isinstance(found, Mapping):
            for each in (found, *(value for value in found.values() if isinstance(value, Mapping))):
                yield str(each.get("rope_type") or each.get("type") or "")
