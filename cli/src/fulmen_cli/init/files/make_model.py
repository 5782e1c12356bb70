"""Builds a tiny untrained model whose tokens are the words of the demonstrations; nothing is downloaded.

It is small enough to learn on a laptop's processor within a minute, and knows nothing but what it is shown. Use a real model
for real tasks: see [policy] in train.toml.
"""

import json
import re
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from fulmen_algorithm.tiny_model import ROLES, ModelSize, make_tokenizer, save_model

DEMONSTRATIONS = Path(__file__).parent / "tasks" / "demonstrations.jsonl"
# One token for each word and each digit, so that numbers which no demonstration has can be written, too.
PIECE = r"[A-Za-z]+|[^A-Za-z]"
DIGITS = "0123456789"
CHAT_TEMPLATE = """\
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


def pieces() -> list[str]:
    """Returns the words and signs of the demonstrations, and of calls of their tools."""
    found = dict.fromkeys(DIGITS)
    for line in DEMONSTRATIONS.read_text().splitlines():
        for message in json.loads(line)["messages"]:
            texts = [message["content"], *(json.dumps(call["function"]) for call in message.get("tool_calls", ()))]
            found.update(dict.fromkeys(re.findall(PIECE, " ".join(texts))))
    return list(dict.fromkeys([*found, "<", ">", "/", "tool", "call", "_", "name", "arguments", *'{}":,\\ ']))


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory.

    Args:
        output_dir: The directory.
        seed: Seed of the first weights.
    """
    tokenizer = make_tokenizer(
        pieces(),
        pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
        roles=(*ROLES, "<|tool|>"),
        # What no model of this size should have to spell.
        phrases=('<tool_call>{"name":"find_order","arguments":{"order":', "}}</tool_call>"),
        chat_template=CHAT_TEMPLATE,
    )
    save_model(tokenizer, output_dir, seed, ModelSize(positions=256))
