"""Slurm's commands as far as they are used, over one machine: jobs are real processes, and options are held strictly.

Its files are in the folder that FAKE_SLURM names. Called as `python fake_slurm.py COMMAND ARGUMENT...`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scancel", "sinfo")
NODES = {"node-a": (2, 4096, "(null)"), "node-b": (2, 4096, "gpu:a100:1(S:0),gpu:t4:1")}
OPTIONS = re.compile(
    r"--(job-name=[\w-]+|output=/.+|no-requeue|no-kill|ntasks=\d+|cpus-per-task=\d+|mem-per-cpu=\d+M|gpus-per-task=\d+|nodes=\d+"
    r"|exclude=[\w,-]+|ntasks-per-node=\d+|spread-job|distribution=block,Pack|partition=[\w-]+|account=[\w-]+|constraint=\w+|time=[\d:]+)"
)


def install(folder: Path) -> dict[str, str]:
    """Writes the commands into a folder; returns the variables with which they are found."""
    programs, state = folder / "slurm-bin", folder / "slurm-state"
    programs.mkdir()
    state.mkdir()
    for name in COMMANDS:
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).absolute()} {name} "$@"\n')
        program.chmod(0o755)
    return {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "FAKE_SLURM": str(state)}


def _sbatch(state: Path, arguments: Sequence[str]) -> int:
    flag, script = arguments
    lines = Path(script).read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    wrong = [option for option in options if not OPTIONS.fullmatch(option)]
    if flag != "--parsable" or lines[0] != "#!/bin/bash" or wrong:
        print(f"sbatch: error: {wrong or flag}", file=sys.stderr)
        return 1
    if (state / "down").exists():
        print("sbatch: error: Unable to contact slurm controller", file=sys.stderr)
        return 1
    told = dict(option[2:].partition("=")[::2] for option in options)
    job = str(len(list(state.glob("*.job"))) + 100)
    with Path(told["output"]).open("wb") as log:
        process = subprocess.Popen(
            ["/bin/bash", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "SLURM_JOB_ID": job,
                "SLURM_NTASKS": told["ntasks"],
                "FAKE_SLURM_EXCLUDED": told.get("exclude", ""),
            },
            start_new_session=True,
        )
    (state / f"{job}.job").write_text(json.dumps({"pid": process.pid}))
    print(f"{job};fake")
    return 0


def _srun(_state: Path, arguments: Sequence[str]) -> int:
    words = [word for word in arguments if not word.startswith("--")]
    count, excluded = int(os.environ["SLURM_NTASKS"]), os.environ["FAKE_SLURM_EXCLUDED"].split(",")
    nodes = [name for name in NODES if name not in excluded]
    tasks = [
        subprocess.Popen(
            words, env={**os.environ, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": nodes[rank % len(nodes)]}
        )
        for rank in range(count)
    ]
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks) and "--kill-on-bad-exit=1" in arguments:
            for task in tasks:
                task.kill()
        time.sleep(0.05)
    return max(abs(task.wait()) for task in tasks)


def _squeue(state: Path, arguments: Sequence[str]) -> int:
    assert arguments[:3] == ["--noheader", "--states=all", "--jobs"], arguments
    assert arguments[4:] == ["--format=%t"], arguments
    file = state / f"{arguments[3]}.job"
    if not file.exists():
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    if _alive(json.loads(file.read_text())["pid"]):
        print("R")
    return 0


def _sacct(state: Path, arguments: Sequence[str]) -> int:
    assert arguments[:4] == ["-X", "--noheader", "--parsable2", "-j"], arguments
    job = arguments[4]
    print("CANCELLED by 0" if (state / f"{job}.cancelled").exists() else "FAILED")
    return 0


def _scancel(state: Path, arguments: Sequence[str]) -> int:
    [job] = arguments
    (state / f"{job}.cancelled").touch()
    with suppress(ProcessLookupError):
        os.killpg(json.loads((state / f"{job}.job").read_text())["pid"], signal.SIGTERM)
    return 0


def _sinfo(_state: Path, arguments: Sequence[str]) -> int:
    assert arguments[:3] == ["--noheader", "--Node", "--format=%N|%c|%m|%G"], arguments
    for name, (cpus, memory, resources) in NODES.items():
        print(f"{name}|{cpus}|{memory}|{resources}")
    return 0


def _alive(pid: int) -> bool:
    try:
        # The script's process is nobody's child here, or init's that has not looked.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    command = {
        "sbatch": _sbatch, "srun": _srun, "squeue": _squeue, "sacct": _sacct, "scancel": _scancel, "sinfo": _sinfo
    }[sys.argv[1]]  # fmt: skip
    sys.exit(command(Path(os.environ["FAKE_SLURM"]), sys.argv[2:]))
