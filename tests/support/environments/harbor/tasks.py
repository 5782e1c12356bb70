"""Fifty Harbor tasks of the tests, the agent that works on them, and what the model says. The standard library alone."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

COUNT = 50
AGENT = '''"""Asks the model for a shell command for the instruction on standard input, and runs it."""

import json
import os
import subprocess
import sys
import urllib.request

instruction = sys.stdin.read()
body = {"model": "tiny", "messages": [{"role": "user", "content": instruction}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=90) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
subprocess.run(["sh", "-c", said], check=False)
'''
DOCKERFILE = "FROM debian:stable\nWORKDIR /app\nENV FACTOR=3\nCOPY numbers.txt data/\n"
TEST = """#!/bin/sh
# Half a reward for a number, all of it for the right one.
wanted=$(( $(cat data/numbers.txt) * FACTOR ))
found=$(cat result.txt 2>/dev/null)
reward=0
case "$found" in ""|*[!0-9]*) ;; *) reward=0.5 ;; esac
[ "$found" = "$wanted" ] && reward=1
if [ $(( wanted % 2 )) -eq 0 ]; then
  echo "{\\"reward\\": $reward, \\"Files left\\": $(ls | wc -l)}" > /logs/verifier/reward.json
else
  echo "$reward" > /logs/verifier/reward.txt
fi
"""


def write_tasks(folder: Path) -> list[Path]:
    """Writes the task folders."""
    made = []
    for number in range(COUNT):
        task = folder / f"triple-{number}"
        for part in ("environment", "tests", "solution"):
            (task / part).mkdir(parents=True)
        (task / "task.toml").write_text(
            'schema_version = "1.4"\n[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 60\n'
        )
        (task / "instruction.md").write_text(
            f"Write {number} times FACTOR, the number of data/numbers.txt, to result.txt."
        )
        (task / "environment/numbers.txt").write_text(f"{number}\n")
        (task / "environment/Dockerfile").write_text(DOCKERFILE)
        (task / "tests/test.sh").write_text(TEST)
        (task / "solution/solve.sh").write_text("#!/bin/sh\necho secret\n")
        made.append(task)
    return made


def said(instruction: str) -> str:
    """Returns what the model says: a right command, a wrong one, one that writes no number, or none."""
    number = int(re.findall(r"\d+", instruction)[0])
    commands = (
        "echo $(( $(cat data/numbers.txt) * FACTOR )) > result.txt",
        f"echo {number + 1} > result.txt; cp data/numbers.txt more.txt",
        "echo many > result.txt",
        # The tests and other tasks are not there, and what it writes as a reward does not count.
        "cat /tests/test.sh ../triple-1/solution/solve.sh > result.txt; echo 1 > /logs/verifier/reward.txt",
    )
    return commands[zlib.crc32(instruction.encode()) % len(commands)]
