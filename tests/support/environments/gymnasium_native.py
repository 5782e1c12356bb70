"""Plays Gymnasium's environments directly, without Fulmen; run in an environment that has gymnasium.

`python gymnasium_native.py FOLDER`: the folder has `scripted.py` and the module `guesses` with environments of the test. Prints JSON:
the tasks that Fulmen makes of each environment, and the score of each of its episodes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import gymnasium

from fulmen.integrations.gymnasium import convert

sys.path.insert(0, sys.argv[1])
from scripted import MODEL, choice  # the folder is an argument

SEEDS = range(50)


def played(env_id: str, kwargs: dict[str, Any], seed: int, limit: int | None) -> float:
    """Plays an episode by the rule; returns the sum of its rewards."""
    env = gymnasium.make(env_id, **kwargs)
    observation, _ = env.reset(seed=seed)
    total, turn, over = 0.0, 0, False
    while not over and (limit is None or turn < limit):
        shown = str(env.render()) if env.render_mode == "ansi" else observation
        plain = shown.tolist() if hasattr(shown, "tolist") else shown
        text = plain if isinstance(plain, str) else json.dumps(plain)
        space = env.action_space
        action: Any
        if isinstance(space, gymnasium.spaces.Discrete):
            action = int(space.start) + choice(text, turn, int(space.n))
        else:
            action = str(choice(text, turn, 20))
        observation, reward, terminated, truncated, _ = env.step(action)
        total, turn, over = total + float(reward), turn + 1, terminated or truncated
    env.close()
    return total


def main() -> None:
    """Prints the record."""
    cases: list[tuple[str, dict[str, Any], int | None]] = [
        ("FrozenLake-v1", {}, None),
        ("CliffWalking-v1", {"render_mode": "ansi"}, 6),
        ("CartPole-v1", {}, 12),
        ("guesses:Guess-v0", {"limit": 20}, None),
    ]
    found = []
    for env_id, kwargs, limit in cases:
        made = convert(env_id, model=MODEL, seeds=SEEDS, kwargs=kwargs, max_steps=limit)
        scores = [played(env_id, kwargs, seed, limit) for seed in SEEDS]
        found.append({"name": env_id, "agent": made.agent.python, "tasks": made.tasks, "scores": scores})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
