"""Builds the model that the tests give to vLLM: a tiny untrained Llama over bytes, made from a seed.

Run as a script, so that the tests need not import torch. The first 256 tokens are the bytes; the weights are large, so
that the greedy choice is clear and does not hang on how calls are batched.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = """\
{%- if tools -%}<|system|>{%- for tool in tools -%}{{ tool['function']['name'] }}{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>{"name": "' + call['function']['name'] + '"}</tool_call>' -}}
{%- endfor -%}
{%- if message['role'] == 'assistant' -%}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer with its chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (END, *ROLES)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build(folder: Path, seed: int) -> None:
    """Writes a model directory: config, safetensors, tokenizer with chat template."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("seeds", type=int, nargs="+")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        build(arguments.root / f"seed-{seed}", seed)


if __name__ == "__main__":
    main()
