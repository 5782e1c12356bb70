"""The front of candidates that are each best at some task, and the choice among them; pure.

Source: Agrawal et al. 2025, "GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning"
(arXiv:2507.19457), algorithm 2.
"""

import random
from collections.abc import Mapping, Sequence

Scores = Mapping[str, Sequence[float | None]]
"""By candidate the rewards on the same tasks, in order; None where a rollout was lost."""


def mean(scores: Sequence[float | None]) -> float:
    """Returns the mean of the present scores; 0 if there are none."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else 0.0


def front(scores: Scores) -> dict[str, int]:
    """Returns the candidates that are best at some task, and at how many, the best by its mean first.

    A candidate is left out if, at each task at which it is best, another that is not left out is as good: the worst by
    its mean are looked at first, of equal ones the later.
    """
    tasks = len(next(iter(scores.values())))
    winners: list[set[str]] = []
    for task in range(tasks):
        found = {name: score for name, each in scores.items() if (score := each[task]) is not None}
        best = max(found.values(), default=None)
        winners.append({name for name, score in found.items() if score == best})
    names = list(scores)
    order = sorted(names, key=lambda name: (mean(scores[name]), -names.index(name)))
    left = {name for each in winners for name in each}
    for name in order:
        wins = [each & left for each in winners if name in each]
        if name in left and all(len(each) > 1 for each in wins):
            left.discard(name)
    return {name: sum(name in each for each in winners) for name in reversed(order) if name in left}


def chosen(weights: Mapping[str, int], chance: random.Random) -> str:
    """Draws a candidate of a front, in proportion to the number of tasks at which it is best."""
    return chance.choices(list(weights), weights=list(weights.values()))[0]
