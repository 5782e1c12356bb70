"""Scores the result, and each agent by its own contribution."""


def grade(task: dict, outcome: dict) -> dict:
    """Returns `reward` for the sum, `plan` for the planner, and `parts` for the solver if it was called."""
    numbers = sorted(task["input"]["question"].split("+"))
    parts, answers = outcome["parts"], outcome["answers"]
    rewards = {
        "reward": float(outcome["answer"] == task["answer"]),
        "plan": float(sorted("+".join(parts).split("+")) == numbers),
    }
    if parts:
        right = [answer == str(sum(map(int, part.split("+")))) for part, answer in zip(parts, answers, strict=True)]
        rewards["parts"] = sum(right) / len(right)
    return rewards
