"""Scores an answer by exact match."""


def grade(task: dict, outcome: str) -> float:
    """Returns 1.0 if the answer is right, else 0.0."""
    return float(outcome.strip() == task["answer"])
