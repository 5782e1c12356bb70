"""A proxy before vendors that it calls through LiteLLM: the real package in its own environment, and fakes of the vendors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.llm_proxy.vendors.native import BedrockVendor, CohereVendor, GeminiVendor, NativeVendor

__all__ = ["ENVIRONMENT", "KEYS", "MODELS", "LitellmWorld", "litellm_python", "litellm_world", "workers"]

ROOT: Final = Path(__file__).absolute().parents[3]
ENVIRONMENT: Final = ROOT / ".venv-litellm"
INSTALL_LIMIT_S: Final = 600

MODELS: Final = {
    "gemini": "gemini-2.5-flash",
    "cohere": "command-a-03-2025",
    "bedrock": "anthropic.claude-3-haiku-20240307-v1:0",
}
KEYS: Final = {
    "gemini": "gemini-key-of-the-tests",
    "cohere": "cohere-key-of-the-tests",
    "bedrock": '{"aws_access_key_id": "AKIAOFTHETESTS", "aws_secret_access_key": "aws-secret-of-the-tests"}',
}
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

    def vendor(self, name: str) -> NativeVendor:
        """Returns a vendor by its name."""
        found: NativeVendor = getattr(self, name)
        return found

    def key(self) -> str:
        """Returns the key of a new attempt."""
        return self.proxy.attempt()[1]


@asynccontextmanager
async def litellm_world(store: FakeStore, **settings: Any) -> AsyncIterator[LitellmWorld]:
    """Runs the vendors and the proxy, with a backend and a route for each; failed calls are not retried unless settings say so."""
    usual: dict[str, Any] = {
        "litellm_python": litellm_python(),
        "backend_keys": {name: {"key": key, "hosts": ["127.0.0.1"]} for name, key in KEYS.items()},
        "prices": PRICES,
        "retry_deadline_s": 0,
        "max_answer_bytes": 1024 * 1024,
    }
    async with (
        GeminiVendor() as gemini,
        CohereVendor() as cohere,
        BedrockVendor() as bedrock,
        running_proxy(store.target, **usual | settings) as proxy,
    ):
        for name, vendor in (("gemini", gemini), ("cohere", cohere), ("bedrock", bedrock)):
            await register(proxy, name, vendor.url)
            await lead(proxy, name, name)
        yield LitellmWorld(proxy=proxy, store=store, gemini=gemini, cohere=cohere, bedrock=bedrock)


async def register(proxy: RunningProxy, provider: str, url: str, *, backend: str = "", **fields: Any) -> None:
    """Registers a backend of a vendor, under the vendor's name if no other is given."""
    usual: dict[str, Any] = {"returns_token_ids": False, "dialect": backend_pb2.DIALECT_LITELLM, "provider": provider}
    usual |= {"key_name": provider, "region": "us-east-1" if provider == "bedrock" else ""}
    await proxy.register(backend or provider, url, **usual | fields)


async def lead(proxy: RunningProxy, model: str, backend: str, *, policy: str = "") -> None:
    """Puts a route of a model to the vendor's model."""
    target = route_pb2.RouteTarget(
        backend=f"backends/{backend}", backend_model=MODELS.get(backend, "any-model"), weight=1, policy=policy
    )
    await proxy.put_route(target, model=model)


def workers() -> list[psutil.Process]:
    """Returns the processes of this one that call vendors."""
    return [each for each in psutil.Process().children(recursive=True) if _calls_vendors(each)]


def _calls_vendors(process: psutil.Process) -> bool:
    try:
        return any("litellm/worker" in word for word in process.cmdline())
    except psutil.Error:
        return False  # it has just ended
