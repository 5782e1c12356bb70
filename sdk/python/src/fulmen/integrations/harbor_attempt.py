"""Runs a Harbor task in an attempt: the agent's command, and then its tests, in namespaces that have the paths of the task.

`fulmen.integrations.harbor.convert` copies this file into the agent's bundle. It needs the standard library and bubblewrap (`bwrap`).
The agent sees the task's working directory, `/logs` and `/agent` (its own files), and the parts of the machine that are needed to run
programs, but neither the tests nor other tasks.

    python harbor_attempt.py run -- COMMAND…    # the instruction is its standard input, and `{instruction}` in an argument
    python harbor_attempt.py grade              # prints the rewards as JSON

Source: the paths and reward files of Harbor 0.26, `harbor/verifier/verifier.py` and `harbor/models/task/paths.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt")
_NOT_IN_DIMENSION = re.compile(r"[^a-z0-9_.-]+")


def main(arguments: Sequence[str]) -> int:
    """Runs the agent or the tests of the attempt's task; returns the exit status."""
    task = json.loads(os.environ["FULMEN_TASK"])["environment"]
    folder, root = Path("tasks", task["name"]), Path(os.environ["FULMEN_WORK_DIR"], "harbor")
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    if arguments[0] == "grade":
        return grade(folder, root, settings)
    return run(folder, root, settings, arguments[2:])


def run(folder: Path, root: Path, settings: Mapping[str, Any], command: Sequence[str]) -> int:
    """Runs the agent's command on the task's files; if it exceeds the task's time, it is stopped and graded in its
    current state."""
    shutil.copytree(folder / "files", root / "files")
    (root / "logs" / "agent").mkdir(parents=True)
    instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    words = [word.replace("{instruction}", instruction) for word in command]
    binds = [] if not Path("agent").is_dir() else ["--ro-bind", str(Path("agent").resolve()), "/agent"]
    try:
        done = subprocess.run(
            [*namespace(root, settings["workdir"], binds), *variables(settings["environment"]), *words],
            input=instruction.encode(),
            timeout=settings["agent_timeout_s"],
            check=False,
        )
    except subprocess.TimeoutExpired:
        print("the agent exceeded the time of the task", file=sys.stderr)
        return 0
    return done.returncode


def grade(folder: Path, root: Path, settings: Mapping[str, Any]) -> int:
    """Runs the task's tests on the files that the agent left, and prints the rewards that they wrote."""
    logs = root / "logs" / "verifier"
    # What the agent left there does not count, and is not in the way: a link, a file, or a folder that cannot be emptied.
    logs.parent.chmod(0o755)
    if os.path.lexists(logs):
        logs.rename(logs.with_name(f"left-{secrets.token_hex(8)}"))
    logs.mkdir()
    shutil.copytree(folder / "tests", root / "tests", dirs_exist_ok=True)
    (root / "tests" / "test.sh").chmod(0o755)
    binds = ["--bind", str(root / "tests"), "/tests"]
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
    environment = {key: value for key, value in os.environ.items() if key not in keys}
    given = {**settings["environment"], **settings["verifier_environment"]}
    with (logs / "test-stdout.txt").open("wb") as output:
        subprocess.run(
            [*namespace(root, settings["workdir"], binds), *variables(given), "/tests/test.sh"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=settings["verifier_timeout_s"],
            check=False,
        )
    try:
        print(json.dumps(rewards_in(logs)))
    except ValueError as error:
        print(f"{error}\n{(logs / 'test-stdout.txt').read_text(errors='replace')[-2000:]}", file=sys.stderr)
        return 1
    return 0


def rewards_in(logs: Path) -> dict[str, float]:
    """Returns the rewards that tests wrote: from `reward.json`, otherwise from `reward.txt`.

    Raises:
        ValueError: If there is neither, or a reward is not a finite number.
    """
    if (logs / "reward.json").exists():
        held = json.loads((logs / "reward.json").read_text(encoding="utf-8"))
    elif (logs / "reward.txt").exists():
        held = float((logs / "reward.txt").read_text(encoding="utf-8"))
    else:
        raise ValueError("The tests wrote neither /logs/verifier/reward.json nor reward.txt.")
    found = held if isinstance(held, dict) else {"reward": held}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"The tests wrote the reward {name} = {value!r}, not a finite number.")
    return {_NOT_IN_DIMENSION.sub("-", name.lower())[:64]: float(value) for name, value in found.items()}


def namespace(root: Path, workdir: str, binds: Sequence[str]) -> list[str]:
    """Returns the beginning of a command that runs with the paths of a task.

    Args:
        root: The attempt's folder, with `files` and `logs`.
        workdir: The task's working directory.
        binds: Further arguments of bubblewrap.
    """
    words = ["bwrap", "--die-with-parent", "--unshare-pid", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108
    words += list(_system())
    words += ["--bind", str(root / "files"), workdir, "--bind", str(root / "logs"), "/logs"]
    return [*words, *binds, "--chdir", workdir]


def variables(given: Mapping[str, str]) -> Iterator[str]:
    """Yields the arguments that set a task's variables only inside the namespace: some, such as `PATH`, would choose the
    bubblewrap."""
    for name, value in {**given, "HOME": "/tmp"}.items():  # noqa: S108  # that of the namespace
        yield from ("--setenv", name, value)


def _system() -> Iterator[str]:
    """Yields the arguments that show the machine's programs, and the Python that runs this, read-only."""
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):
        if not prefix.startswith(tuple(f"/{name}" for name in SYSTEM)):
            yield from ("--ro-bind", prefix, prefix)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
