"""An algorithm service in a process of its own, which is killed and started again."""

from __future__ import annotations

import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.service_kit.processes import ServiceProcess, serving_process

__all__ = ["Machine"]


class Machine:
    """A service that can be killed, and started again on the same port and state.

    Args:
        store_target: Address of its store.
        token: Its token.
        folder: Folder of its state.
        settings: Further settings.
    """

    def __init__(self, store_target: str, token: str, folder: Path, **settings: object) -> None:
        self.port = free_ports()[0]
        self.address = f"127.0.0.1:{self.port}"
        self._settings = {
            "token": token,
            "port": self.port,
            "metrics_port": 0,
            "state_dir": folder / "state",
            "store_target": store_target,
            **settings,
        }
        self._life = AsyncExitStack()
        self._process: ServiceProcess | None = None

    async def start(self) -> None:
        self._process = await self._life.enter_async_context(
            serving_process("fulmen_algorithm", self._settings, trains="warm_start" not in self._settings)
        )

    async def stop(self) -> None:
        await self._life.aclose()

    def kill(self) -> None:
        """Kills it; `stop` takes up what is left of it."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)

    async def restart(self) -> None:
        """Kills it and starts it again."""
        self.kill()
        await self.stop()
        await self.start()
