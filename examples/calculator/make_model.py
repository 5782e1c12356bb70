"""Builds the base model of the calculator example: a tiny untrained Llama that can write calls of one tool.

A call is `<tool_call>{"name":"calculator","arguments":{"expression":"12*34"}}</tool_call>`. What surrounds the
expression is two tokens, and the characters in them (quotes, braces, angle brackets) have no tokens of their own, so
there is only one way to write a call. A number of two digits is one token, and there is none for a single digit, so
there is only one way to write a number, too.

Invariant: whatever the model samples, short of a role marker, is rendered back to the same tokens when the client
echoes the assistant's message; so the prompt of the second call begins with prompt and completion of the first.
"""

import string

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fulmen_algorithm.tiny_model import ROLES, make_tokenizer, run_command_line, save_model

NUMBERS = tuple(f"{number:02d}" for number in range(100))
CHARACTERS = string.ascii_letters + "+-*/().,:=?! "
CALL_OPEN = '<tool_call>{"name":"calculator","arguments":{"expression":"'
CALL_CLOSE = '"}}</tool_call>'
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
    return make_tokenizer(
        (*NUMBERS, *CHARACTERS),
        pre_tokenizers.Split(Regex(r"\d\d|."), behavior="isolated"),
        roles=(*ROLES, "<|tool|>"),
        phrases=(CALL_OPEN, CALL_CLOSE),
        chat_template=CHAT_TEMPLATE,
    )


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory; a chain of seven operations needs more than the usual 128 positions."""
    save_model(build_tokenizer(), output_dir, seed, positions=256)


if __name__ == "__main__":
    run_command_line(build, __doc__)
