"""Builds the base model of the arithmetic example: a tiny untrained Llama on single characters, without downloads.

Invariant: every text of the example is one token per character, each role marker and the end of a turn is one token,
and a rendered conversation is a token prefix of the same conversation continued.
"""

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fulmen_algorithm.tiny_model import ModelSize, make_tokenizer, run_command_line, save_model

CHARACTERS = "0123456789+-*/=(). ?"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the character tokenizer."""
    return make_tokenizer(CHARACTERS, pre_tokenizers.Split(Regex("."), behavior="isolated"))


def build(output_dir: str, seed: int = 0, *, hidden: int = 96, layers: int = 2, heads: int = 4, mlp: int = 384) -> None:
    """Writes a model directory with the sizes of `save_model`."""
    save_model(build_tokenizer(), output_dir, seed, ModelSize(hidden=hidden, layers=layers, heads=heads, mlp=mlp))


if __name__ == "__main__":
    run_command_line(build, __doc__)
