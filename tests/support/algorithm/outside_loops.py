"""Trainers of loops outside of the service: what they are given, and services that hold them."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import fulmen
from fulmen.client.aio.trainers import AsyncTrainer
from fulmen_service_kit.security.tokens import Role
from tests.support.service_kit.processes import ServiceProcess, serving_process
from tests.support.store.running import StoreHandle

__all__ = ["LORA", "ROWS", "Machine", "client_of", "steps"]

LORA = fulmen.Lora(rank=4)
ROWS = [fulmen.Row(token_ids=[8, 9, 10 + n, 11, 12 + n]) for n in range(6)]


def client_of(store: StoreHandle, algorithm: str) -> fulmen.AsyncClient:
    return fulmen.AsyncClient(
        store=store.target, algorithm=algorithm, llm_proxy="127.0.0.1:1", token=store.token(Role.CLIENT)
    )


class Machine:
    """A service in a process of its own, which can be killed and started again on the same port and state."""

    def __init__(self, store: StoreHandle, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        token = store.token(Role.SERVICE, project="projects/*")
        self._settings = {
            "token": token,
            "port": port,
            "metrics_port": 0,
            "state_dir": folder / "state",
            "store_target": store.target,
            "model_roots": "/",
        }
        self._life = AsyncExitStack()
        self._process: ServiceProcess | None = None

    async def start(self) -> None:
        self._process = await self._life.enter_async_context(serving_process("fulmen_algorithm", self._settings))

    async def kill(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        await self._life.aclose()

    async def stop(self) -> None:
        await self._life.aclose()


async def steps(trainer: AsyncTrainer, numbers: range) -> list[float]:
    """Takes steps, each on a part of the rows; returns the losses."""
    losses = []
    for number in numbers:
        losses.append((await trainer.forward_backward(ROWS[number % 3 :])).loss)
        await trainer.optim_step(learning_rate=1e-2)
    return losses
