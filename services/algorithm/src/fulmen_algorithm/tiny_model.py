"""Tiny untrained models over a vocabulary of one's own, for `make_model.py` files: nothing is downloaded.

An example supplies its tokens and how a text is split into them; the rest is common and is here.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.decoders import Decoder
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def make_tokenizer(
    tokens: Iterable[str],
    pre_tokenizer: PreTokenizer,
    *,
    decoder: Decoder | None = None,
    roles: Sequence[str] = ROLES,
    phrases: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token for each role marker, the end of a turn, and each piece of text.

    Args:
        tokens: Known pieces of text; any other piece is unknown.
        pre_tokenizer: Cuts a text into pieces.
        decoder: Joins pieces again; left out, one follows the other.
        roles: Markers of the roles that the chat template writes.
        phrases: Texts that are one token wherever they occur, and are read before a text is cut.
        chat_template: Writes a conversation as text.
    """
    special = (PAD, UNKNOWN, END, *roles)
    vocabulary = {token: index for index, token in enumerate((*special, *phrases, *tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder or decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    # Not special: they must survive decoding.
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = chat_template
    return fast


def save_model(
    tokenizer: PreTrainedTokenizerFast,
    output_dir: str,
    seed: int,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    mlp: int = 256,
    positions: int = 128,
) -> None:
    """Writes a model directory: config and safetensors of an untrained Llama, and its tokenizer.

    Args:
        tokenizer: Its tokenizer.
        output_dir: Directory to write; made if missing.
        seed: Seed of the initial weights.
        hidden: Width of the residual stream.
        layers: Number of layers.
        heads: Attention heads.
        mlp: Width of the feed-forward layers.
        positions: Tokens that a conversation may have.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


def run_command_line(build: Callable[[str, int], None], description: str | None) -> None:
    """Calls a `build` function with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("output_dir")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.output_dir, arguments.seed)
