"""Builds the small model: a tiny untrained Qwen3 with the words of the demonstrations. Nothing is downloaded.

Its template leaves out the system message: the model learns the desk's work from demonstrations, and needs fewer tokens.
The text around the arguments of a tool is one token; a number, and the letter of an order, are one token each.
"""

import json
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from fulmen_algorithm.tiny_model import ROLES, Architecture, ModelSize, make_tokenizer, run_command_line, save_model

DEMONSTRATIONS = Path(__file__).parent / "data/desk.train.jsonl"
PIECES = Regex(r"[A-Z](?=\d)|\d+| ?[A-Za-z]+(?!\d)|.")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CALLS = {
    "look_up_order": ('{"order": "', '"}'),
    "refund_policy": ('{"item": "', '"}'),
    "open_refund": ('{"order": "', '", "euros": ', "}"),
}
"""The tools, with the text around their arguments. Each tool's braces are their own token."""
TEMPLATE = """\
{%- for message in messages if message['role'] != 'system' -%}
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


def phrases() -> list[str]:
    """Returns the texts around arguments, the longest first, since they are matched in this order."""
    found = set()
    for name, (first, *between, last) in CALLS.items():
        found |= {f'<tool_call>{{"name":"{name}","arguments":{first}', *between, f"{last}}}</tool_call>"}
    return sorted(found, key=len, reverse=True)


def words() -> list[str]:
    """Returns the pieces of every text of the demonstrations."""
    splitter = pre_tokenizers.Split(PIECES, behavior="isolated")
    rows = map(json.loads, DEMONSTRATIONS.read_text().splitlines())
    texts = (message["content"] or "" for row in rows for message in row["messages"] if message["role"] != "system")
    found = {piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)}
    items = {piece.strip() for piece in found if piece.strip().isalpha()}
    return sorted(found | items | {*LETTERS, *map(str, range(100))})


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory."""
    tokenizer = make_tokenizer(
        words(),
        pre_tokenizers.Split(PIECES, behavior="isolated"),
        roles=(*ROLES, "<|tool|>"),
        phrases=phrases(),
        chat_template=TEMPLATE,
    )
    save_model(tokenizer, output_dir, seed, ModelSize(positions=256), architecture=Architecture.QWEN3)


if __name__ == "__main__":
    run_command_line(build, __doc__)
