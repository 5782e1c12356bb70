"""Scores a function by tests that the agent has not seen."""

from trial import PASSED, run


def grade(task: dict, outcome: str) -> float:
    """Returns 1.0 if the function passes all hidden tests, else 0.0."""
    return float(run(outcome, task["tests"]) == PASSED)
