"""How long the algorithm service and its engine take to come back after kill -9 while the demo trains.

    python -m benchmarks.restarts                                # three kills of each
    python -m benchmarks.restarts --victims algorithm --trials 5

Starts the local stack, trains the arithmetic example, and kills in the stage that learns from rewards. For each kill it
prints the seconds until the victim serves again and until the run has taken its next step, and at the end the memory of the stack's processes.
Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from benchmarks.demo import CONFIG, ROOT, UP_LIMIT_S, fulmen
from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import FulmenError
from fulmen.rpc.services import Services, Targets, connect
from fulmen_cli.local.record import ServiceState, StackFolder, StackRecord

STAGE = "grpo"
# Imitation is not what is measured, and the other stage must not end before the last kill.
SETTINGS = ("sft.steps=100", "sft.warmup_steps=10", "grpo.steps=400")
FIRST_STEP = 3
POLL_S = 0.1
LIMIT_S = 300.0
VICTIMS = ("algorithm", "engine")
ENGINE_MODULE = "fulmen_algorithm.engines.embedded"


async def until(check: Callable[[], Awaitable[bool]]) -> float:
    """Returns the seconds until a check holds; a service that does not answer is asked again."""
    started = time.monotonic()
    while time.monotonic() - started < LIMIT_S:
        try:
            async with asyncio.timeout(5):
                if await check():
                    return time.monotonic() - started
        except (FulmenError, TimeoutError):
            pass
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"nothing happened within {LIMIT_S:.0f} s")


def recorded(folder: StackFolder) -> StackRecord:
    """Returns the record of the stack that runs in a folder."""
    record = folder.read()
    if record is None:
        raise SystemExit(f"no stack runs in {folder.path}")
    return record


class Demo:
    """The running demo."""

    def __init__(self, folder: Path, client: Services) -> None:
        self._folder = StackFolder(folder.resolve())
        self._client = client

    async def step(self) -> int:
        """Returns the step of the run that learns from rewards; -1 before it begins."""
        answer = await self._client.training_runs.ListTrainingRuns(training_run_service_pb2.ListTrainingRunsRequest())
        running = training_run_pb2.TRAINING_RUN_STATE_RUNNING
        return max(
            (run.step for run in answer.training_runs if run.algorithm == STAGE and run.state == running), default=-1
        )

    async def past(self, step: int) -> bool:
        """Returns whether the run has taken a later step."""
        return await self.step() > step

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Returns the processes of the stack's algorithm service, its engines, and all others that import torch."""
        supervisor = psutil.Process(recorded(self._folder).supervisor_pid)
        found: dict[str, list[psutil.Process]] = {}
        for process in supervisor.children(recursive=True):
            try:
                words = " ".join(process.cmdline())
            except psutil.Error:
                continue  # it has ended
            kind = (
                "engine"
                if ENGINE_MODULE in words
                else next((k for k in ("fork_server", "fulmen_algorithm") if k in words), "")
            )
            if kind:
                found.setdefault({"fulmen_algorithm": "algorithm"}.get(kind, kind), []).append(process)
        return found

    async def kill(self, victim: str) -> tuple[float, float]:
        """Kills; returns the seconds until the victim serves and until the next step."""
        step = await self.step()
        pids = {process.pid for process in self.processes()[victim]}
        for pid in pids:
            psutil.Process(pid).send_signal(signal.SIGKILL)

        async def back() -> bool:
            if victim == "algorithm":
                service = recorded(self._folder).service(victim)
                return service.state is ServiceState.READY and service.pid not in pids
            alive = [p for p in self.processes().get(victim, []) if p.pid not in pids]
            return any(_listens(process) for process in alive)

        returned, stepped = await asyncio.gather(until(back), until(lambda: self.past(step)))
        return returned, stepped


def _listens(process: psutil.Process) -> bool:
    try:
        return any(each.status == psutil.CONN_LISTEN for each in process.net_connections(kind="tcp"))
    except psutil.Error:
        return False


async def measure(folder: Path, victims: list[str], trials: int) -> None:
    """Kills every victim as often as asked, in turn, and prints what it took."""
    record = recorded(StackFolder(folder.resolve()))
    targets = Targets(**{name: record.targets[name] for name in ("store", "algorithm", "llm_proxy")})
    token = Path(record.client_token_file).read_text(encoding="utf-8").strip()
    async with connect(targets, token=token) as client:
        demo = Demo(folder, client)
        await until(lambda: demo.past(FIRST_STEP - 1))
        took: dict[str, list[tuple[float, float]]] = {victim: [] for victim in victims}
        for _ in range(trials):
            for victim in victims:
                step = await demo.step()
                await until(lambda before=step: demo.past(before))  # type: ignore[misc]  # bound at once
                took[victim].append(await demo.kill(victim))
                back, stepped = took[victim][-1]
                sys.stdout.write(f"{victim}: serves after {back:.1f} s, next step after {stepped:.1f} s\n")
        for victim, pairs in took.items():
            back, stepped = (statistics.median(each) for each in zip(*pairs, strict=True))
            worst = max(stepped for _, stepped in pairs)
            line = {"victim": victim, "trials": trials, "serves_s": round(back, 1), "step_s": round(stepped, 1)}
            sys.stdout.write(json.dumps({**line, "worst_step_s": round(worst, 1)}) + "\n")
        for kind, processes in sorted(demo.processes().items()):
            for process in processes:
                memory = process.memory_full_info()
                parts = f"rss {memory.rss >> 20} MiB, own {memory.uss >> 20} MiB, share {memory.pss >> 20} MiB"
                sys.stdout.write(f"memory of {kind}: {parts}\n")


async def train_and_measure(folder: Path, victims: list[str], trials: int) -> None:
    """Trains in a process of its own and measures meanwhile."""
    shorter = [word for assignment in SETTINGS for word in ("--set", assignment)]
    command = (sys.executable, "-m", "fulmen_cli", "train", str(CONFIG), "--state-dir", str(folder), *shorter)
    quiet = asyncio.subprocess.DEVNULL
    training = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=quiet, stderr=quiet)
    try:
        await measure(folder, victims, trials)
    finally:
        training.terminate()
        await training.wait()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--trials", type=int, default=3)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fulmen-restarts-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        fulmen(folder, "up", limit_s=UP_LIMIT_S, quiet=True)
        asyncio.run(train_and_measure(folder, given.victims, given.trials))
    finally:
        fulmen(folder, "down", limit_s=UP_LIMIT_S, quiet=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
