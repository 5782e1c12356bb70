"""Scores an answer. Replace the rule by yours: any number, or a mapping from dimension to number."""


def grade(task: dict, outcome: str) -> float:
    """Returns 1.0 if the answer is exactly right, else 0.0.

    Args:
        task: A line of the task file.
        outcome: What the agent returned or printed.
    """
    return float(outcome.strip() == task["answer"])
