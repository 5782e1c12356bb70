"""Publishes an agent of the browser tests to the stack of a state directory; prints the name of its version.

python -m tests.support.browser_agent FOLDER         # its task says what happens: {"answer": …, "reward": …} or {"fail": …}
python -m tests.support.browser_agent FOLDER lines   # writes lines of a megabyte to standard output and error
"""

from __future__ import annotations

import sys
import tempfile
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


def always(task: Any, outcome: Any) -> float:
    """Gives a reward to anything."""
    return 1.0


LINES = ["python3", "-c", "import sys; sys.stderr.write('e' * 10**6); print('o' * 10**6)"]


if __name__ == "__main__":
    with fulmen.Client(state_dir=sys.argv[1]) as client:
        if "lines" in sys.argv:
            with tempfile.TemporaryDirectory() as empty:
                print(client.publish_agent("lines", LINES, reward=always, folder=empty).name)
        else:
            print(client.publish_agent("told", solve, reward=grade).name)
