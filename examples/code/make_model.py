"""Builds the base model of the code example: a tiny untrained Qwen3 on whole words, without downloads.

Every word of a sentence, an expression or a result is one token.
"""

import sys
from pathlib import Path

from fulmen_algorithm.tiny_model import Architecture, ModelSize, make_word_tokenizer, run_command_line, save_model

sys.path.insert(0, str(Path(__file__).parent))
from functions import WORDS


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory; three trials need more than the usual 128 positions."""
    tokenizer = make_word_tokenizer(WORDS, tool=("run", "code"))
    save_model(tokenizer, output_dir, seed, ModelSize(positions=256), architecture=Architecture.QWEN3)


if __name__ == "__main__":
    run_command_line(build, __doc__)
