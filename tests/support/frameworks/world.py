"""A framework's agent as a process in its own environment, before a real proxy whose backend's tokens are captured."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.frameworks.model import multiply
from tests.support.llm_proxy.backend import Backend, logprob_of, prompt_ids_of, token_ids_of
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target

ROOT = Path(__file__).absolute().parents[3]
AGENTS = ROOT / "tests" / "frameworks" / "agents"
ENVIRONMENTS = ROOT / ".venv-frameworks"
PROGRAM_S = 200.0
"""Time that a framework's program may take: loading one takes ten seconds of CPU, and several load at once."""

# Nothing may call out: the frameworks' telemetry is off, and they use the prices that they ship.
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """An agent that has ended."""

    status: int
    output: str
    errors: str

    @property
    def results(self) -> dict[str, Any]:
        """What it printed last.

        Raises:
            AssertionError: if it failed.
        """
        assert self.status == 0, self.errors
        return dict(json.loads(self.output.splitlines()[-1]))


class Outside:
    """Stands for everything beyond this machine; notes who knocks, and lets nobody through."""

    def __init__(self) -> None:
        self.knocks: list[str] = []
        self._port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """What the frameworks' clients are told is the way out."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Outside:
        self._server = await asyncio.start_server(self._refuse, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocks.append((await reader.readline()).decode(errors="replace"))
        writer.close()


@dataclass(frozen=True, kw_only=True)
class World:
    """What a test plays with."""

    proxy: RunningProxy
    store: FakeStore
    backend: Backend
    home: Path
    outside: Outside

    async def run(self, framework: str, *arguments: str, key: str) -> Ran:
        """Runs the agent of a framework with the environment variables that the framework itself reads."""
        folder = ENVIRONMENTS / framework
        assert (folder / ".setup-stamp").exists(), f"{framework} is not installed: run `make test-frameworks`"
        root = self.proxy.url.removesuffix("/v1")
        addresses = {
            "AGENT_MODEL": MODEL,
            "OPENAI_BASE_URL": self.proxy.url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": key,
            "HTTP_PROXY": self.outside.url,
            "HTTPS_PROXY": self.outside.url,
            "NO_PROXY": "127.0.0.1",
        }
        # It gets nothing from whoever runs the tests: no keys, no proxies, no home with settings in it.
        clean = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        process = await asyncio.create_subprocess_exec(
            folder / "bin" / "python",
            AGENTS / f"{framework}_agent.py",
            *arguments,
            cwd=self.home,
            env=clean | QUIET | addresses,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(PROGRAM_S):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return Ran(status=process.returncode or 0, output=output.decode(), errors=errors.decode())

    async def records(self, attempt: str) -> list[ModelCallRecord]:
        """Returns what was recorded of an attempt, in order; every record must be fit for training, exact to the token."""
        summary = await self.proxy.flush(attempt)
        assert (summary.flushed, summary.unusable_count) == (True, 0)
        records = [record for _, record in self.store.spans(attempt) if record is not None]
        for record in records:
            ids, logprobs = array("i", record.completion_token_ids), array("f", record.completion_logprobs)
            assert record.usable
            assert list(ids) == token_ids_of(said(record))
            assert logprobs == array("f", [logprob_of(token, place) for place, token in enumerate(ids)])
            messages = json.loads(record.request_json)["messages"]
            assert array("i", record.prompt_token_ids).tolist() == prompt_ids_of(messages)
        return records

    def refusals(self) -> int:
        """Returns how many requests the proxy has refused because their attempt was over."""
        samples = [sample for metric in self.proxy.registry.collect() for sample in metric.samples]
        mine = [s for s in samples if s.name == "fulmen_llm_proxy_errors_total" and s.labels["cause"] == "attempt_over"]
        return int(sum(sample.value for sample in mine))


def said(record: ModelCallRecord) -> str:
    """Returns what the model said, as the answer has it: a text, or the arguments of a tool."""
    message = json.loads(record.response_json)["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    return "".join(call["function"]["arguments"] for call in calls) or message["content"]


@asynccontextmanager
async def a_world(home: Path, **settings: Any) -> AsyncIterator[World]:
    """Runs a store, a backend, and a proxy with a trainable route to it."""
    async with (
        FakeStore() as store,
        Backend(script=multiply) as backend,
        running_proxy(store.target, **settings) as proxy,
        Outside() as outside,
    ):
        await proxy.register("one", backend.url)
        await proxy.put_route(target("one"))
        yield World(proxy=proxy, store=store, backend=backend, home=home, outside=outside)
