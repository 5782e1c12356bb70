"""Replicas of the store as processes on one PostgreSQL, each at a port that it keeps over its deaths."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.ports import free_ports
from tests.support.postgres import PostgresServer
from tests.support.store.running import SIGNING_KEY

__all__ = ["ReplicaGroup"]

START_LIMIT_S = 60.0
TOKEN_TTL_S = 3600


class ReplicaGroup:
    """Starts and kills the replicas and their PostgreSQL."""

    def __init__(self, server: PostgresServer, folder: Path, *, count: int, **settings: str) -> None:
        self.server = server
        self.dsn = server.fresh_database()
        self._folder = folder
        self._settings = settings
        self._ports = free_ports(count)
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self.token = TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="chaos", ttl_s=TOKEN_TTL_S)

    @property
    def targets(self) -> list[str]:
        """Where the replicas listen, alive or not."""
        return [f"127.0.0.1:{port}" for port in self._ports]

    async def start(self) -> None:
        """Starts every replica and waits until all serve."""
        await asyncio.gather(*(self.start_replica(index) for index in range(len(self._ports))))

    async def start_replica(self, index: int) -> None:
        """Starts one replica and waits until it serves."""
        ready = self._folder / f"ready-{index}"
        ready.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FULMEN_")}
        environment |= {
            "FULMEN_STORE_DATABASE_URL": self.dsn,
            "FULMEN_STORE_PORT": str(self._ports[index]),
            "FULMEN_STORE_METRICS_PORT": "0",
            "FULMEN_STORE_HTTP_PORT": "0",
            "FULMEN_STORE_SIGNING_KEY": SIGNING_KEY,
            "FULMEN_STORE_READY_FILE": str(ready),
            "FULMEN_STORE_LOG_LEVEL": "warning",
        } | self._settings
        with self.log(index).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fulmen_store", "serve"], env=environment, stdout=log, stderr=log
            )
        self._processes[index] = process
        async with asyncio.timeout(START_LIMIT_S):
            while not ready.exists():
                assert process.poll() is None, self.log(index).read_text(errors="replace")[-2000:]
                await asyncio.sleep(0.05)

    def log(self, index: int) -> Path:
        """The file that holds what a replica wrote."""
        return self._folder / f"replica-{index}.log"

    def dead(self) -> list[str]:
        """Returns what the replicas wrote last that ended although nobody killed them."""
        return [
            f"replica {index} ended with {process.returncode}: {self.log(index).read_text(errors='replace')[-2000:]}"
            for index, process in enumerate(self._processes)
            if process is not None and process.poll() is not None
        ]

    async def kill_replica(self, index: int) -> None:
        """Kills a replica (SIGKILL) and starts it again."""
        process = self._processes[index]
        assert process is not None
        process.kill()
        await asyncio.to_thread(process.wait, START_LIMIT_S)
        await self.start_replica(index)

    async def kill_database(self) -> None:
        """Kills the postmaster (SIGKILL) and starts it again; its backends end when they notice."""
        assert self.server.embedded is not None
        await asyncio.to_thread(self.server.embedded.kill)
        await asyncio.to_thread(self.server.embedded.start)

    def kill_backend(self, rng: random.Random) -> None:
        """Kills one of the store's backends (SIGKILL): PostgreSQL ends all of them and recovers."""
        postmaster = psutil.Process(int((self._data_dir() / "postmaster.pid").read_text().split("\n", 1)[0]))
        backends = [child for child in postmaster.children() if "[local]" in " ".join(child.cmdline())]
        if backends:
            os.kill(rng.choice(backends).pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ends every replica."""
        for process in self._processes:
            if process is not None:
                process.kill()
                process.wait(START_LIMIT_S)

    def _data_dir(self) -> Path:
        assert self.server.embedded is not None
        return self.server.embedded.log_file.parent
