"""The task's repository, where a harness works, and a folder for the harness's settings. Each attempt has its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(os.environ.get("FULMEN_WORK_DIR", "."))
MODEL = os.environ["AGENT_MODEL"]
CONTEXT_TOKENS = os.environ.get("CONTEXT_TOKENS", "32768")
"""How many tokens the model's context has."""

MAX_TOKENS = os.environ.get("MAX_TOKENS", "4096")
"""The most tokens of one answer."""


def lay_out() -> tuple[str, Path]:
    """Writes the files of the task on standard input; returns what is to be done, and the folder of the repository."""
    given = json.load(sys.stdin)["input"]
    repository = FOLDER.resolve() / "repository"
    for name, text in given["files"].items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return given["issue"], repository


def settings_folder(name: str) -> Path:
    """Returns an empty folder for a harness's own files, instead of the one in the user's home."""
    folder = FOLDER.resolve() / name
    folder.mkdir()
    return folder


def run(command: list[str], repository: Path, settings: Mapping[str, str]) -> int:
    """Runs a harness in the repository, with variables of its own; returns its exit status."""
    # Whatever the policy runs must find neither the test, which the task has, nor a file to write rewards in, nor what is in a home:
    # login shells would run its profile in each command.
    given = {name: value for name, value in os.environ.items() if not name.startswith("FULMEN_")}
    given["HOME"] = str(settings_folder("home"))
    done = subprocess.run(command, cwd=repository, env={**given, **settings}, stdin=subprocess.DEVNULL, check=False)
    return done.returncode
