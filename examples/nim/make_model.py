"""Builds the base model of the nim example: a tiny untrained Qwen3 on numbers, without downloads."""

import sys
from pathlib import Path

from fulmen_algorithm.tiny_model import Architecture, make_word_tokenizer, run_command_line, save_model

sys.path.insert(0, str(Path(__file__).parent))
from rules import MOST

WORDS = tuple(map(str, range(1, MOST + 1)))


def build(output_dir: str, seed: int = 0) -> None:
    """Writes a model directory."""
    save_model(make_word_tokenizer(WORDS), output_dir, seed, architecture=Architecture.QWEN3)


if __name__ == "__main__":
    run_command_line(build, __doc__)
