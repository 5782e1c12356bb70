"""Runs the test of a task in the repository as the harness left it; the reward is 1 if it passes, else 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 60

task = json.load(sys.stdin)["task"]
repository = Path(os.environ["FULMEN_WORK_DIR"]) / "repository"
try:
    tested = subprocess.run(
        [sys.executable, "-c", task["test"]], cwd=repository, timeout=LIMIT_S, capture_output=True, check=False
    )
    print(int(tested.returncode == 0))
except (OSError, subprocess.TimeoutExpired):
    # Too slow, or it has removed its repository.
    print(0)
