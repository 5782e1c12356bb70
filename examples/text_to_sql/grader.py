"""Scores a statement by what it returns. Whatever the agent returns has a score: a statement that fails scores 0."""

from typing import Any

from matching import fault


def grade(task: dict[str, Any], outcome: object) -> float:
    """Returns 1.0 if the statement has the rows of the task's own statement, on both databases, else 0.0."""
    return float(not fault(task, outcome))
