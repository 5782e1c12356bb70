"""Scores the result, and each agent by its own contribution."""


def grade(task: dict, outcome: dict) -> dict:
    """Returns `reward` for the answer, and `plan`, `results`, `verdicts` and `total` for the agents that were called."""
    numbers = sorted(task["input"]["question"].split("+"))
    rewards = {
        "reward": float(outcome["answer"] == task["answer"]),
        "plan": float(sorted("+".join(outcome["parts"]).split("+")) == numbers),
    }
    right, agreed = [], []
    for part, tries in zip(outcome["parts"], outcome["computed"], strict=True):
        wanted = str(sum(map(int, part.split("+"))))
        for result, verdict in tries:
            right.append(result == wanted)
            agreed.append(verdict == ("y" if result == wanted else "n"))
    if right:
        rewards |= {"results": sum(right) / len(right), "verdicts": sum(agreed) / len(agreed)}
        last = [tries[-1][0] for tries in outcome["computed"]]
        if all(map(str.isdecimal, last)):
            rewards["total"] = float(outcome["answer"] == str(sum(map(int, last))))
    return rewards
