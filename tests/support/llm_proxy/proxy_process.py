"""A proxy as a process of its own, so that it can be killed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen.llm_proxy.v1 import capture_service_pb2, capture_service_pb2_grpc
from fulmen.rpc.channel import open_channel
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.llm_proxy.harness import SIGNING_KEY

READY_LIMIT_S = 30


@dataclass(kw_only=True)
class ProxyProcess:
    """A proxy that serves, seen from outside."""

    process: asyncio.subprocess.Process
    ports: dict[str, int]
    token: str
    log: list[str]
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        """The base URL that an OpenAI client is given."""
        return f"http://127.0.0.1:{self.ports['http_port']}/v1"

    async def chat(self, key: str, content: str, *, model: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Makes one whole call; returns the status and the answer."""
        body = {"model": model, "messages": [{"role": "user", "content": content}], **fields}
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(f"{self.url}/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    @property
    def operator_url(self) -> str:
        """URL of the operator's port."""
        return f"http://127.0.0.1:{self.ports['metrics_port']}"

    async def flush(self, attempts: list[str], *, timeout: float) -> list[capture_service_pb2.CaptureSummary]:
        """Flushes attempts; returns their summaries."""
        async with open_channel(f"127.0.0.1:{self.ports['port']}", token=self.token) as channel:
            request = capture_service_pb2.FlushCapturesRequest(attempts=attempts)
            answer = await capture_service_pb2_grpc.CaptureServiceStub(channel).FlushCaptures(request, timeout=timeout)
        return list(answer.summaries)

    async def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        async with self.http.get(f"{self.operator_url}/metrics") as answer:
            text = await answer.text()
        values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert values, f"there is no metric {name}"
        return sum(map(float, values))

    async def until(self, name: str, value: float) -> None:
        """Returns when a metric has a value; the caller gives the deadline."""
        while await self.metric(name) != value:  # noqa: ASYNC110  # state of another process
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        """Ends it as the kernel does, with no chance to do anything."""
        self.process.kill()
        await self.process.wait()


def new_attempt(rollout_id: uuid.UUID | None = None, *, signing_key: str = SIGNING_KEY) -> tuple[str, str]:
    """Returns the name of an attempt, of a new rollout if none is given, and its key."""
    name = AttemptName(project=DEFAULT_PROJECT, rollout_id=rollout_id or uuid7(), number=1)
    return str(name), TokenSigner(signing_key).attempt_key(
        name, project=DEFAULT_PROJECT, lease_id="lease-1", epoch=1, mode="train", ttl_s=600
    )


@asynccontextmanager
async def proxy_process(
    store_target: str, ready: Path, *, signing_key: str, keeper: Sequence[str] = (), **settings: object
) -> AsyncIterator[ProxyProcess]:
    """Runs `fulmen_llm_proxy serve` until the block ends; kills it if it still runs then.

    Args:
        keeper: What runs it, as in a container; then this is the process.
    """
    token = TokenSigner(signing_key).issue(Role.SERVICE, subject="llm_proxy", ttl_s=600)
    ready.unlink(missing_ok=True)
    values = {
        "attempt_key_secret": attempt_secrets(signing_key),
        "token": token,
        "store_target": store_target,
        "port": 0,
        "http_port": 0,
        "metrics_port": 0,
        "ready_file": ready,
        **settings,
    }
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | {
        f"FULMEN_LLM_PROXY_{name.upper()}": str(value) for name, value in values.items()
    }
    process = await asyncio.create_subprocess_exec(
        *(*keeper, sys.executable, "-m", "fulmen_llm_proxy", "serve"), env=environment, stderr=asyncio.subprocess.PIPE
    )
    log: list[str] = []
    serving = asyncio.Event()
    reading = asyncio.create_task(_read_log(process, log, serving))
    session = aiohttp.ClientSession()
    try:
        async with asyncio.timeout(READY_LIMIT_S):
            await serving.wait()
            assert process.returncode is None, "".join(log)
            while not ready.exists():  # noqa: ASYNC110  # state of another process
                await asyncio.sleep(0.01)
        ports = msgspec.json.decode(ready.read_bytes())
        yield ProxyProcess(process=process, ports=ports, token=token, log=log, http=session)
    finally:
        await session.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading


async def _read_log(process: asyncio.subprocess.Process, log: list[str], serving: asyncio.Event) -> None:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        log.append(line.decode())
        if '"serving"' in log[-1]:
            serving.set()
    serving.set()
