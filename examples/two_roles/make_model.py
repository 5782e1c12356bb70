"""Builds the base model of the two_roles example: a tiny untrained Llama on single characters, without downloads.

Invariant: every text of the example is one token per character, each role marker and the end of a turn is one token,
and a rendered conversation is a token prefix of the same conversation continued.
"""

from tokenizers import Regex, pre_tokenizers

from fulmen_algorithm.tiny_model import make_tokenizer, run_command_line, save_model

CHARACTERS = "0123456789+=? "


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory."""
    tokenizer = make_tokenizer(CHARACTERS, pre_tokenizers.Split(Regex("."), behavior="isolated"))
    save_model(tokenizer, output_dir, seed)


if __name__ == "__main__":
    run_command_line(build, __doc__)
