"""Builds the players: tiny untrained models of two architectures that can write a call of each game's tool.

A call's text before and after its argument is one token each, and so is each word, so there is only one way to write
anything.
"""

from rules import GAMES, WORDS
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fulmen_algorithm.tiny_model import ROLES, TOOL_CHAT_TEMPLATE, Architecture, ModelSize, make_tokenizer, save_model

CALL_CLOSE = '"}}</tool_call>'


def call_open(tool: str) -> str:
    """Returns the text of a call before its argument."""
    return f'<tool_call>{{"name":"{tool}","arguments":{{"value":"'


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer with its chat template."""
    return make_tokenizer(
        WORDS,
        pre_tokenizers.Split(Regex(r"\d\d|[A-Z]\d|[A-Z][a-z]*|."), behavior="isolated"),
        roles=(*ROLES, "<|tool|>"),
        phrases=(*(call_open(game.tool) for game in GAMES.values()), CALL_CLOSE),
        chat_template=TOOL_CHAT_TEMPLATE,
    )


def llama(output_dir: str, seed: int = 0) -> None:
    """Writes the model directory of a Llama."""
    _save(output_dir, seed, Architecture.LLAMA)


def qwen3(output_dir: str, seed: int = 0) -> None:
    """Writes the model directory of a Qwen3."""
    _save(output_dir, seed, Architecture.QWEN3)


def _save(output_dir: str, seed: int, architecture: Architecture) -> None:
    save_model(build_tokenizer(), output_dir, seed, ModelSize(positions=256), architecture=architecture)
