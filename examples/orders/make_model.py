"""Builds the base model of the orders example: a tiny untrained Llama on whole words, without downloads.

Invariant: every word of the example, each role marker and the end of a turn is one token.
"""

import sys
from pathlib import Path

from fulmen_algorithm.tiny_model import make_word_tokenizer, run_command_line, save_model

sys.path.insert(0, str(Path(__file__).parent))
from words import EVERY


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory."""
    save_model(make_word_tokenizer(EVERY), output_dir, seed)


if __name__ == "__main__":
    run_command_line(build, __doc__)
