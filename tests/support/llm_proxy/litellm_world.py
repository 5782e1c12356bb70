"""A proxy before vendors that it calls through LiteLLM: the real package in its own environment, and fakes of the vendors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.llm_proxy.vendors.native import BedrockVendor, CohereVendor, GeminiVendor, NativeVendor, VertexVendor

__all__ = ["ENVIRONMENT", "KEYS", "MODELS", "LitellmWorld", "litellm_python", "litellm_world", "workers"]

ROOT: Final = Path(__file__).absolute().parents[3]
ENVIRONMENT: Final = ROOT / ".venv-litellm"
INSTALL_LIMIT_S: Final = 600

MODELS: Final = {
    "gemini": "gemini-2.5-flash",
    "vertex_ai": "gemini-2.5-pro",
    "cohere": "command-a-03-2025",
    "bedrock": "anthropic.claude-3-haiku-20240307-v1:0",
}
VENDORS: Final = {"bedrock": BedrockVendor, "cohere": CohereVendor, "gemini": GeminiVendor, "vertex_ai": VertexVendor}
KEYS: Final = {
    "gemini": "gemini-key-of-the-tests",
    "cohere": "cohere-key-of-the-tests",
    "bedrock": '{"aws_access_key_id": "AKIAOFTHETESTS", "aws_secret_access_key": "aws-secret-of-the-tests"}',
}
REGIONS: Final = {"bedrock": "us-east-1", "vertex_ai": "us-central1"}
PRICES: Final = {"*": {"input": 2.0, "output": 8.0}}


def litellm_python() -> str:
    """Returns the interpreter of LiteLLM's environment: made in CI; elsewhere the test is skipped if it is missing."""
    if os.environ.get("CI"):
        subprocess.run(["tools/litellm_env.sh"], cwd=ROOT, check=True, timeout=INSTALL_LIMIT_S)
    elif not (ENVIRONMENT / ".setup-stamp").exists():
        pytest.skip("LiteLLM is not installed: `make litellm-env` installs it")
    return str(ENVIRONMENT / "bin" / "python")


@dataclass(frozen=True, kw_only=True)
class LitellmWorld:
    """The proxy, and what stands behind it; each vendor is served under its own name."""

    proxy: RunningProxy
    store: FakeStore
    gemini: GeminiVendor
    cohere: CohereVendor
    bedrock: BedrockVendor
    vertex_ai: VertexVendor

    def vendor(self, name: str) -> NativeVendor:
        """Returns a vendor by its name."""
        found: NativeVendor = getattr(self, name)
        return found

    def processes_of(self, name: str) -> list[psutil.Process]:
        """Returns the processes that are connected to a vendor, to be asked for right after a call."""
        port = self.vendor(name).port
        return [each for each in workers() if any(to.raddr and to.raddr.port == port for to in each.net_connections())]

    def key(self) -> str:
        """Returns the key of a new attempt."""
        return self.proxy.attempt()[1]


@asynccontextmanager
async def litellm_world(store: FakeStore, **settings: Any) -> AsyncIterator[LitellmWorld]:
    """Runs the vendors and the proxy, with a backend and a route for each; failed calls are not retried unless settings say so."""
    async with AsyncExitStack() as stack:
        vendors: dict[str, Any] = {name: await stack.enter_async_context(made()) for name, made in VENDORS.items()}
        keys = {**KEYS, "vertex_ai": vendors["vertex_ai"].account()}
        usual: dict[str, Any] = {
            "litellm_python": litellm_python(),
            "backend_keys": {name: {"key": key, "hosts": ["127.0.0.1"]} for name, key in keys.items()},
            "prices": PRICES,
            "retry_deadline_s": 0,
            "max_answer_bytes": 1024 * 1024,
        }
        proxy = await stack.enter_async_context(running_proxy(store.target, **usual | settings))
        for name, vendor in vendors.items():
            await register(proxy, name, vendor.url)
            await lead(proxy, name, name)
        yield LitellmWorld(proxy=proxy, store=store, **vendors)


async def register(proxy: RunningProxy, provider: str, url: str, *, backend: str = "", **fields: Any) -> None:
    """Registers a backend of a vendor, under the vendor's name if no other is given."""
    usual: dict[str, Any] = {"returns_token_ids": False, "dialect": backend_pb2.DIALECT_LITELLM, "provider": provider}
    usual |= {"key_name": provider, "region": REGIONS.get(provider, "")}
    await proxy.register(backend or provider, url, **usual | fields)


async def lead(proxy: RunningProxy, model: str, backend: str, *, policy: str = "") -> None:
    """Puts a route of a model to the vendor's model."""
    target = route_pb2.RouteTarget(
        backend=f"backends/{backend}", backend_model=MODELS.get(backend, "any-model"), weight=1, policy=policy
    )
    await proxy.put_route(target, model=model)


def workers(pid: int | None = None) -> list[psutil.Process]:
    """Returns the processes that call vendors for a process, this one unless another is named."""
    return [each for each in psutil.Process(pid).children(recursive=True) if _calls_vendors(each)]


def _calls_vendors(process: psutil.Process) -> bool:
    try:
        return any("litellm/worker" in word for word in process.cmdline())
    except psutil.Error:
        return False  # it has just ended
