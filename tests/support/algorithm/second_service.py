"""A second algorithm service beside a stack's own, with a state folder, ports and engines of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fulmen.rpc.services import Services, connect
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.warm import given_forks
from tests.support.stack import stack_targets

START_LIMIT_S = 120.0
PREFIX = "FULMEN_ALGORITHM_"


@dataclass(slots=True, kw_only=True)
class SecondService:
    """A running algorithm service."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def second_service(stack: LocalStack, folder: Path, **settings: str) -> AsyncIterator[SecondService]:
    """Runs another algorithm service with the settings of the stack's, but for `settings` and what must differ."""
    environment = {**os.environ, **stack.spec("algorithm").environment}
    folder.mkdir(parents=True, exist_ok=True)
    ready, log = folder / "ready.json", folder / "log"
    own = {"PORT": "0", "METRICS_PORT": "0", "STATE_DIR": str(folder / "state"), "READY_FILE": str(ready)}
    environment |= {f"{PREFIX}{name}": value for name, value in (own | {"ENGINE_BACKEND": "second"} | settings).items()}
    with log.open("wb") as output, given_forks() as (variables, passed):
        command = [sys.executable, "-m", "fulmen_algorithm", "serve"]
        process = subprocess.Popen(
            command, env={**environment, **variables}, pass_fds=passed, stdout=output, stderr=output
        )
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not ready.exists() or not ready.read_bytes():  # a process of its own
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.1)
        yield SecondService(process=process, port=json.loads(ready.read_bytes())["port"], log=log)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
        await asyncio.to_thread(process.wait, START_LIMIT_S)


def client_of(stack: LocalStack, service: SecondService) -> AbstractAsyncContextManager[Services]:
    """Returns a client whose calls about runs go to the second service."""
    targets = stack_targets(stack)
    return connect(
        type(targets)(store=targets.store, algorithm=service.address, llm_proxy=targets.llm_proxy),
        token=stack.client_token,
    )
