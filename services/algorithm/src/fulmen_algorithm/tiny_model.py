"""Tiny untrained models for `make_model.py` files; nothing is downloaded.

An example supplies its tokens and how a text is split into them.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import Decoder
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

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
# Arguments are rendered as the client echoes them, never parsed and printed again.
TOOL_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '<tool_call>{"name":"' + call['function']['name'] + '","arguments":' -}}
{{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{%- if message['role'] == 'assistant' -%}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
_SPACE = "▁"


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
        tokens: Known pieces of text; other pieces become the unknown token.
        pre_tokenizer: Splits a text into pieces.
        decoder: Joins pieces again; None concatenates them.
        roles: Role markers in the chat template.
        phrases: Texts that are always one token, matched before a text is split.
        chat_template: Jinja template that renders a conversation.
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


def make_word_tokenizer(words: Iterable[str], *, tool: tuple[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token for each word.

    Args:
        words: All words that occur, without spaces.
        tool: Name of a tool and of its only argument, a text. A call is
            `<tool_call>{"name":"query","arguments":{"sql":" SELECT 1"}}</tool_call>`: what comes before and after the text is one
            token each, whose characters have no other tokens, so that there is only one way to write a call.
    """
    spaced: dict[str, Any] = {"replacement": _SPACE, "prepend_scheme": "always"}
    more: dict[str, Any] = {}
    if tool is not None:
        phrases = (f'<tool_call>{{"name":"{tool[0]}","arguments":{{"{tool[1]}":"', '"}}</tool_call>')
        more = {"roles": (*ROLES, "<|tool|>"), "phrases": phrases, "chat_template": TOOL_CHAT_TEMPLATE}
    return make_tokenizer(
        (_SPACE + word for word in words),
        pre_tokenizers.Metaspace(**spaced),
        decoder=decoders.Metaspace(**spaced),
        **more,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of a model.

    Attributes:
        hidden: Width of the residual stream.
        layers: Number of layers.
        heads: Number of attention heads.
        mlp: Width of the feed-forward layers.
        positions: Maximum length of a conversation, in tokens.
    """

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    mlp: int = 256
    positions: int = 128


DEFAULT_SIZE = ModelSize()


class Architecture(StrEnum):
    """Architecture of a model, as transformers names it."""

    LLAMA = "llama"
    QWEN3 = "qwen3"


def save_model(
    tokenizer: PreTrainedTokenizerFast,
    output_dir: str,
    seed: int,
    size: ModelSize = DEFAULT_SIZE,
    *,
    architecture: Architecture = Architecture.LLAMA,
) -> None:
    """Writes a model directory: config and safetensors of an untrained model, and its tokenizer.

    Args:
        tokenizer: The tokenizer.
        output_dir: Directory to write; created if missing.
        seed: Seed of the initial weights.
        size: Size of the model.
        architecture: Architecture of the model.
    """
    config = AutoConfig.for_model(
        architecture.value,
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=size.positions,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
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
