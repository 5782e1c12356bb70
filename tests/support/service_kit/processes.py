"""Services as processes, with their secrets in the environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from tests.support.algorithm.warm import given_forks

LIMIT_S = 90


@dataclass(frozen=True, kw_only=True)
class ServiceProcess:
    """A service that serves."""

    pid: int
    port: int


@asynccontextmanager
async def serving_process(
    module: str, settings: Mapping[str, object], *, trains: bool = False
) -> AsyncIterator[ServiceProcess]:
    """Runs `python -m module serve` with settings without their prefix; stops it at the end.

    `trains`: it will start engines or ranks, and forks what all tests of this process fork.
    """
    prefix = f"{module.upper()}_"
    variables = {f"{prefix}{name.upper()}": str(value) for name, value in settings.items()}
    none: tuple[dict[str, str], tuple[int, ...]] = ({}, ())
    with given_forks() if trains else nullcontext(none) as given:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "serve"],
            env={**os.environ, **variables, **given[0]},
            pass_fds=given[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert process.stdout is not None
    output = process.stdout
    lines: list[str] = []

    def announced() -> dict[str, int]:
        for line in output:
            lines.append(line)
            if '"event": "serving"' in line:
                found: dict[str, int] = json.loads(line)
                return found
        raise AssertionError("".join(lines))

    draining = threading.Thread(target=lambda: lines.extend(output), daemon=True)
    try:
        ports = await asyncio.to_thread(announced)
        # A full pipe would block it.
        draining.start()
        yield ServiceProcess(pid=process.pid, port=ports["port"])
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, LIMIT_S)
        if draining.ident is not None:
            await asyncio.to_thread(draining.join, LIMIT_S)
        output.close()
