"""Publishes the agent of the browser tests to the stack of a state directory; prints the name of its version.

Its task says what happens: `{"answer": …, "reward": …}`, or `{"fail": …}`.
"""

from __future__ import annotations

import sys
from typing import Any

import fulmen


def solve(task: Any) -> Any:
    """Answers what the task says, or fails."""
    if "fail" in task:
        raise ValueError(task["fail"])
    return task["answer"]


def grade(task: Any, outcome: Any) -> float:
    """Gives the reward that the task says."""
    return float(task["reward"])


if __name__ == "__main__":
    with fulmen.Client(state_dir=sys.argv[1]) as client:
        print(client.publish_agent("told", solve, reward=grade).name)
