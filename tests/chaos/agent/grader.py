"""Scores how many digits were said; also an untrained model varies in it, and nothing is ever worth 0."""

LEAST = 0.1
MOST_DIGITS = 16


def grade(task: dict, outcome: str) -> float:
    """Returns a reward from 0.1 to 1."""
    digits = sum(character.isdigit() for character in outcome)
    return LEAST + (1 - LEAST) * min(digits, MOST_DIGITS) / MOST_DIGITS
