"""Builds the base model of the text-to-SQL example: a tiny untrained Qwen3 on whole words, without downloads.

A call is `<tool_call>{"name":"query","arguments":{"sql":" SELECT COUNT(*) FROM orders"}}</tool_call>`. The parts before and
after the statement are one token each, and their characters have no other tokens, so there is only one way to write a
call. Every word of a question, a statement or a result is one token.
"""

import sys
from pathlib import Path

from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fulmen_algorithm.tiny_model import ROLES, Architecture, ModelSize, make_tokenizer, run_command_line, save_model

sys.path.insert(0, str(Path(__file__).parent))
from questions import WORDS

SPACE = "▁"
SPACED = {"replacement": SPACE, "prepend_scheme": "always"}
CALL_OPEN = '<tool_call>{"name":"query","arguments":{"sql":"'
CALL_CLOSE = '"}}</tool_call>'
# Arguments are rendered as the client echoes them, never parsed and printed again.
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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer with its chat template."""
    return make_tokenizer(
        (SPACE + word for word in WORDS),
        pre_tokenizers.Metaspace(**SPACED),
        decoder=decoders.Metaspace(**SPACED),
        roles=(*ROLES, "<|tool|>"),
        phrases=(CALL_OPEN, CALL_CLOSE),
        chat_template=CHAT_TEMPLATE,
    )


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory; three statements need more than the usual 128 positions."""
    save_model(build_tokenizer(), output_dir, seed, ModelSize(positions=256), architecture=Architecture.QWEN3)


if __name__ == "__main__":
    run_command_line(build, __doc__)
