"""A runner to measure: a real process beside a real store, which the benchmark of the store sets up."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import outcome
from benchmarks.proxy.processes import cpu_seconds, memory_mb, running, tree
from benchmarks.store.stand import Bench as StoreBench
from benchmarks.store.stand import postgres_pids, running_store
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from fulmen_service_kit.security.tokens import Role, TokenSigner

START_LIMIT_S = 60.0
AGENTS = Path(__file__).with_name("agents.py")
INPUT = b'{"question": "What is 17 + 25?", "pad": "' + b"x" * 300 + b'"}'
CREATE_AT_ONCE = 500


@dataclass(slots=True)
class Bench:
    """What is measured, and what came out."""

    store: StoreBench
    signing_key: str
    folder: Path
    short: bool
    raw: dict[str, Any] = field(default_factory=dict)
    claims: list[outcome.Claim] = field(default_factory=list)

    def claim(self, name: str, value: float, unit: str, goal: float, better: str) -> None:
        """Records one claim."""
        self.claims.append(outcome.claim(name, value, unit, goal=goal, better=better))

    def server_cpu_s(self) -> dict[str, float]:
        """Returns the CPU seconds of the store and of PostgreSQL until now."""
        return {
            "store": cpu_seconds(self.store.store_pids),
            "postgres": cpu_seconds(postgres_pids(self.store.postgres_folder)),
        }

    async def create(self, count: int, *, timeout_s: int = 300) -> None:
        """Queues rollouts."""
        stub = rollout_service_pb2_grpc.RolloutServiceStub(self.store.channel)
        policy = rollout_pb2.RolloutPolicy()
        policy.attempt_timeout.seconds = timeout_s
        for start in range(0, count, CREATE_AT_ONCE):
            rollouts = [
                rollout_pb2.Rollout(input=INPUT, input_content_type="application/json", policy=policy)
                for _ in range(min(CREATE_AT_ONCE, count - start))
            ]
            await stub.BatchCreateRollouts(
                rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts), timeout=60
            )


@dataclass(slots=True)
class Runner:
    """A runner that runs."""

    process: asyncio.subprocess.Process
    channel: FulmenChannel

    async def status(self) -> runner_service_pb2.GetStatusResponse:
        """Asks how it does."""
        stub = runner_service_pb2_grpc.RunnerServiceStub(self.channel)
        return await stub.GetStatus(runner_service_pb2.GetStatusRequest(), timeout=10)

    def cpu_s(self) -> float:
        """Returns the CPU seconds of it and its children until now."""
        return cpu_seconds(tree(self.process.pid))

    def memory_mb(self) -> float:
        """Returns the resident memory of it and its children, MB."""
        return memory_mb(tree(self.process.pid))


@asynccontextmanager
async def running_runner(
    bench: Bench, *, agent: str, slots: int, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Runner]:
    """Starts a runner with an agent of `agents.py`, and stops it in the end."""
    ready = bench.folder / f"runner-{secrets.token_hex(4)}.json"
    signer = TokenSigner(bench.signing_key)
    settings = {
        "FULMEN_RUNNER_STORE_TARGET": bench.store.target,
        "FULMEN_RUNNER_TOKEN": signer.issue(Role.RUNNER, subject="bench", ttl_s=7200),
        "FULMEN_RUNNER_PORT": "0",
        "FULMEN_RUNNER_METRICS_PORT": "0",
        "FULMEN_RUNNER_READY_FILE": str(ready),
        "FULMEN_RUNNER_LOG_LEVEL": "warning",
        "FULMEN_RUNNER_SLOTS": str(slots),
        "FULMEN_RUNNER_AGENT": f"{AGENTS}:{agent}",
        "FULMEN_RUNNER_DRAIN_GRACE_S": "3",
        "FULMEN_RUNNER_ISOLATION": "trusted",
    }
    log = bench.folder / "runner.log"
    async with running(
        sys.executable, "-m", "fulmen_runner", "serve", log=log, environment={**settings, **(environment or {})}
    ) as process:
        port = await _port(process, ready, log)
        token = signer.issue(Role.SERVICE, subject="bench", ttl_s=7200)
        async with open_channel(f"127.0.0.1:{port}", token=token) as channel:
            yield Runner(process=process, channel=channel)


async def _port(process: asyncio.subprocess.Process, ready: Path, log: Path) -> int:
    deadline = time.monotonic() + START_LIMIT_S
    while not ready.exists():  # a file of another process
        if process.returncode is not None or time.monotonic() > deadline:
            raise SystemExit(f"the runner does not serve:\n{log.read_text()[-2000:]}")
        await asyncio.sleep(0.05)
    return int(json.loads(ready.read_text())["port"])


@asynccontextmanager
async def standing(folder: Path, *, short: bool) -> AsyncIterator[Bench]:
    """Starts a store to run against."""
    key = secrets.token_urlsafe(32)
    (folder / "store").mkdir()
    (folder / "store").chmod(0o755)
    async with running_store(folder / "store", short=short, signing_key=key) as store:
        yield Bench(store=store, signing_key=key, folder=folder, short=short)


def cpus() -> int:
    """Returns how many processors everything runs on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
