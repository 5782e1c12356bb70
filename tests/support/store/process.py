"""A store in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from fulmen.ids import uuid7
from tests.support.store.running import SIGNING_KEY

__all__ = ["StoreProcess"]

START_LIMIT_S = 60.0


class StoreProcess:
    """A store in a process of its own."""

    def __init__(self, dsn: str, folder: Path, *arguments: str, **settings: str) -> None:
        self.ready_file = folder / f"ready-{uuid7()}"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("FULMEN_")}
        self.environment |= {
            "FULMEN_STORE_DATABASE_URL": dsn,
            "FULMEN_STORE_PORT": "0",
            "FULMEN_STORE_METRICS_PORT": "0",
            "FULMEN_STORE_HTTP_PORT": "0",
            "FULMEN_STORE_SIGNING_KEY": SIGNING_KEY,
            "FULMEN_STORE_READY_FILE": str(self.ready_file),
            "FULMEN_STORE_LOG_LEVEL": "warning",
        } | settings
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fulmen_store", *(arguments or ("serve",))],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    async def port(self) -> int:
        """Waits until it serves."""
        async with asyncio.timeout(START_LIMIT_S):
            while not self.ready_file.exists():
                assert self.process.poll() is None, self.end()
                await asyncio.sleep(0.05)
        return int(json.loads(self.ready_file.read_text())["port"])

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self, signal_number: int = signal.SIGTERM) -> str:
        """Ends it if need be and returns what it wrote."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        output, _ = self.process.communicate(timeout=START_LIMIT_S)
        return output
