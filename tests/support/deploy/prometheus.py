"""A Prometheus that watches services for a while, for tests that ask it what dashboards and alerts ask."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from fulmen_cli.local.ports import choose_ports
from tests.support.algorithm.runs import eventually

__all__ = ["Prometheus", "program", "running_prometheus"]

STOP_S = 20


def program(name: str) -> str:
    """Returns where a program of Prometheus is; where it is missing, CI fails and others skip."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed: tools/monitoring_toolchain.sh installs it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class Prometheus:
    """Asks a running Prometheus."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        """Takes its port."""
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._session = session

    async def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Returns an answer of the API, whatever its status."""
        async with self._session.get(f"{self._url}/{path}", params=parameters) as answer:
            return await answer.json()

    async def value(self, query: str) -> float | None:
        """Returns the one value of a query; None if there is none, or no answer yet."""
        try:
            result = (await self.get("query", query=query))["data"]["result"]
        except aiohttp.ClientError:
            return None
        return float(result[0]["value"][1]) if result else None


@asynccontextmanager
async def running_prometheus(
    folder: Path, jobs: Mapping[str, Sequence[int]], *, rules: Path
) -> AsyncIterator[Prometheus]:
    """Starts Prometheus and yields it once it has seen every job twice.

    Args:
        folder: where its configuration and data go.
        jobs: ports of this machine with /metrics, by the name of their job.
        rules: a file of rules, evaluated every second.
    """
    [port] = choose_ports(["any"], {}, {}, rng=random.Random()).values()
    scrapes = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{each}" for each in ports]}]}
        for job, ports in jobs.items()
    ]
    often = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": often, "rule_files": [str(rules)], "scrape_configs": scrapes}))
    process = await asyncio.create_subprocess_exec(
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            prometheus = Prometheus(port, session)
            count = sum(map(len, jobs.values()))

            async def sees_all() -> bool:
                return await prometheus.value("count(count_over_time(up[1m]) > 2 and up == 1)") == count

            await eventually(sees_all, what="Prometheus scrapes all services")
            yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(STOP_S):
            await process.wait()
