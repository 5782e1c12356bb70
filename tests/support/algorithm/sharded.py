"""Tiny models as they lie on a hub: made from their configuration, with weights in several files."""

from __future__ import annotations

from pathlib import Path

__all__ = ["sharded_model"]


def sharded_model(folder: Path, base: Path) -> dict[str, bytes]:
    """Writes a tiny Qwen3 with the tokenizer of another model, its weights in several shards; returns its files."""
    # Imported late: whoever only runs the server needs no torch.
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
