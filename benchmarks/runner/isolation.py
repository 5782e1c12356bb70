"""What an attempt costs at each level of isolation: the start of a command, and attempts of a Python agent in children.

Levels that this machine does not have are left out. CPU counts the runner's side, the child and everything between them.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.runner.stand import Bench, running_runner
from benchmarks.runner.throughput import reached
from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.command.limits import allowance
from fulmen_runner.agents.command.process import ProcessLimits, run_process
from fulmen_runner.agents.isolation import SETTING, AgentIsolation
from fulmen_service_kit.isolation.launch import Files, Isolator
from fulmen_service_kit.isolation.levels import Isolation

LEVELS = (Isolation.TRUSTED, Isolation.PROCESS, Isolation.SANDBOX)
SLOTS = 4
GOAL_START_CPU_MS = 60.0


async def run(bench: Bench) -> None:
    """Measures each level that this machine has."""
    commands, attempts = (50, 300) if bench.short else (300, 2000)
    for level in LEVELS:
        isolator = Isolator(level, setting=SETTING)
        if level is Isolation.SANDBOX and isolator.problem:
            bench.raw[f"isolation {level}"] = {"problem": isolator.problem}
            continue
        # Where others cannot read this Python, a process keeps the user, as one does that only the tenant asks for.
        started = await _commands(Isolator(Isolation.TRUSTED, setting=SETTING), level, commands)
        if isolator.problem:
            bench.raw[f"isolation {level}"] = {"problem": isolator.problem, "command": started}
            continue
        bench.raw[f"isolation {level}"] = {"layers": isolator.layers, "command": started}
        bench.claim(f"CPU of starting a command, `{level}`", started["cpu_ms"], "ms", GOAL_START_CPU_MS, "lower")
        async with running_runner(
            bench, agent="trivial", slots=SLOTS, environment={"FULMEN_RUNNER_ISOLATION": level.value}
        ) as runner:
            await bench.create(attempts)
            first = await reached(bench, runner, attempts // 3)
            last = await reached(bench, runner, attempts - SLOTS)
            ended = last["ended"] - first["ended"]
            bench.raw[f"isolation {level}"]["python"] = {
                "per_s": ended / (last["at_s"] - first["at_s"]),
                "cpu_ms": (last["runner"] - first["runner"]) / ended * 1e3,
            }
            await reached(bench, runner, attempts)


async def _commands(isolator: Isolator, level: Isolation, count: int) -> dict[str, float]:
    """Starts `true` one after the other; returns the median duration and the CPU of one, in ms."""
    guardian, isolation, took = Guardian(), AgentIsolation(isolator=isolator), list[float]()
    limits = ProcessLimits(stdout_kept_bytes=1024, stderr_kept_bytes=1024, output_allowed_bytes=65_536)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        cpu_s = _cpu_s()
        for number in range(count + 1):
            if number == 1:
                # The first one starts the guardian and tries the level.
                cpu_s, took = _cpu_s(), []
            started = time.perf_counter()
            own = Path(folder)
            launch = await isolation.launch(
                ("true",),
                level,
                files=Files(writable=(own,), folder=own),
                allowance=allowance(memory_bytes=2**32, process_count=4096),
                owned=own,
            )
            result = await run_process(
                launch, cwd=own, environment=dict(os.environ), stdin=b"", limits=limits, guardian=guardian
            )
            if result.failure:
                raise SystemExit(result.failure)
            took.append(time.perf_counter() - started)
        await guardian.close()
    return {"ms": statistics.median(took) * 1e3, "cpu_ms": (_cpu_s() - cpu_s) / count * 1e3}


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usages)
