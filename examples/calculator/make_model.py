"""Builds the base model of the calculator example: a tiny untrained Llama that can write calls of one tool.

A call is `<tool_call>{"name":"calculator","arguments":{"expression":"12*34"}}</tool_call>`. The parts before and after
the expression are one token each, and their characters (quotes, braces, angle brackets) have no other tokens, so there
is only one way to write a call. A two-digit number is one token, and single digits have no tokens, so there is only one
way to write a number.

Invariant: any sampled text without a role marker is rendered to the same tokens when the client echoes the assistant's
message, so the prompt of the second call begins with the prompt and completion of the first.
"""

import string

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fulmen_algorithm.tiny_model import (
    ROLES,
    TOOL_CHAT_TEMPLATE,
    ModelSize,
    make_tokenizer,
    run_command_line,
    save_model,
)

NUMBERS = tuple(f"{number:02d}" for number in range(100))
CHARACTERS = string.ascii_letters + "+-*/().,:=?! "
CALL_OPEN = '<tool_call>{"name":"calculator","arguments":{"expression":"'
CALL_CLOSE = '"}}</tool_call>'
# The names of the tools come first.
CHAT_TEMPLATE = (
    "{%- if tools -%}<|system|>{%- for tool in tools -%}{{ tool['function']['name'] }}{%- endfor -%}{%- endif -%}\n"
    + TOOL_CHAT_TEMPLATE
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer with its chat template."""
    return make_tokenizer(
        (*NUMBERS, *CHARACTERS),
        pre_tokenizers.Split(Regex(r"\d\d|."), behavior="isolated"),
        roles=(*ROLES, "<|tool|>"),
        phrases=(CALL_OPEN, CALL_CLOSE),
        chat_template=CHAT_TEMPLATE,
    )


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory; a chain of seven operations needs more than the usual 128 positions."""
    save_model(build_tokenizer(), output_dir, seed, ModelSize(positions=256))


if __name__ == "__main__":
    run_command_line(build, __doc__)
