"""Builds the base model of the four_roles example: a tiny untrained Qwen3 on single characters, without downloads.

Invariant: every text of the example is one token per character, and each role marker and the end of a turn is one token.
"""

from tokenizers import Regex, pre_tokenizers

from fulmen_algorithm.tiny_model import Architecture, make_tokenizer, run_command_line, save_model

CHARACTERS = "0123456789+=?!~yn "


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory."""
    tokenizer = make_tokenizer(CHARACTERS, pre_tokenizers.Split(Regex("."), behavior="isolated"))
    save_model(tokenizer, output_dir, seed, architecture=Architecture.QWEN3)


if __name__ == "__main__":
    run_command_line(build, __doc__)
