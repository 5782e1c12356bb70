"""Builds the base model of the calculator example: a tiny untrained Llama that can write calls of one tool.

A call is `<tool_call>{"name":"calculator","arguments":{"expression":"12*34"}}</tool_call>`. What surrounds the
expression is two tokens, and the characters in them (quotes, braces, angle brackets) have no tokens of their own, so
there is only one way to write a call. A number of two digits is one token, and there is none for a single digit, so
there is only one way to write a number, too.

Invariant: whatever the model samples, short of a role marker, is rendered back to the same tokens when the client
echoes the assistant's message; so the prompt of the second call begins with prompt and completion of the first.
"""

import argparse
import string
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUMBERS = tuple(f"{number:02d}" for number in range(100))
CHARACTERS = string.ascii_letters + "+-*/().,:=?! "
CALL_OPEN = '<tool_call>{"name":"calculator","arguments":{"expression":"'
CALL_CLOSE = '"}}</tool_call>'
END = "<|end|>"
PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
# Arguments are rendered as the text that the client echoes, never parsed and printed anew.
CHAT_TEMPLATE = """\
{%- if tools -%}<|system|>{%- for tool in tools -%}{{ tool['function']['name'] }}{%- endfor -%}{%- endif -%}
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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer with its chat template."""
    special = (PAD, UNKNOWN, END, *ROLES)
    vocabulary = {token: index for index, token in enumerate((*special, CALL_OPEN, CALL_CLOSE, *NUMBERS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d\d|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    # Not special: the text of a call must survive decoding.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in (CALL_OPEN, CALL_CLOSE)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build(output_dir: str, seed: int = 0, *, hidden: int = 64, layers: int = 2, heads: int = 4, mlp: int = 256) -> None:
    """Writes a model directory (config, safetensors, tokenizer with chat template).

    Args:
        output_dir: Directory to write; made if missing.
        seed: Seed of the initial weights.
        hidden: Width of the residual stream.
        layers: Number of layers.
        heads: Attention heads.
        mlp: Width of the feed-forward layers.
    """
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=256,
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


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.output_dir, arguments.seed)


if __name__ == "__main__":
    main()
