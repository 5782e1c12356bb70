"""A tiny mixture of experts whose experts differ, so that another choice is seen in its log-probabilities."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.algorithm.models import small_model

__all__ = ["EXPERTS", "LAYERS", "TOP_K", "mixture", "mixture_folder"]

LAYERS, EXPERTS, TOP_K = 2, 8, 2


def mixture(*, vocabulary: int = 32, seed: int = 0, scale: float = 4.0) -> PreTrainedModel:
    """Builds a model with two layers of eight experts, of which two compute each token."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def mixture_folder(folder: Path, *, scale: float = 4.0) -> Path:
    """Writes such a model with the tokenizer of the arithmetic example; returns its folder."""
    small_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = mixture(vocabulary=len(tokenizer), scale=scale)
    for own in (model.config, model.generation_config):
        own.eos_token_id, own.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder
