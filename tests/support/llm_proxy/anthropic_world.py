"""A proxy before Anthropic's service and an engine whose tokens are captured, and the vendor's clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target
from tests.support.llm_proxy.vendors.anthropic import KEY, MODEL, AnthropicVendor

CLAUDE = "claude"
"""The route to the vendor; `harness.MODEL` is the one to the engine."""


@dataclass(frozen=True, kw_only=True)
class AnthropicWorld:
    """What a test of the Anthropic dialect plays with."""

    proxy: RunningProxy
    vendor: AnthropicVendor
    backend: Backend
    store: FakeStore

    @property
    def url(self) -> str:
        """The base URL that an Anthropic client is given."""
        return self.proxy.url.removesuffix("/v1")

    def agent(self, key: str | None = None, **options: Any) -> anthropic.AsyncAnthropic:
        """Returns the vendor's own client, which knows nothing of the proxy but its address."""
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=key or self.key(), **{"max_retries": 0} | options)

    def openai_agent(self, key: str | None = None) -> openai.AsyncOpenAI:
        """Returns the client of the other vendor."""
        return openai.AsyncOpenAI(base_url=self.proxy.url, api_key=key or self.key(), max_retries=0)

    def key(self) -> str:
        """Returns the key of a new attempt."""
        return self.proxy.attempt()[1]


@asynccontextmanager
async def anthropic_world(store: FakeStore, backend: Backend, **settings: Any) -> AsyncIterator[AnthropicWorld]:
    """Runs the vendor and the proxy, with the routes `claude` and the trainable `tiny`."""
    async with (
        AnthropicVendor() as vendor,
        running_proxy(store.target, **{"backend_keys": {"vendor": KEY}} | settings) as proxy,
    ):
        await proxy.register(
            "anthropic",
            vendor.url,
            dialect=backend_pb2.DIALECT_ANTHROPIC,
            key_name="vendor",
            returns_token_ids=False,
        )
        await proxy.register("one", backend.url)
        place = route_pb2.RouteTarget(backend="backends/anthropic", backend_model=MODEL, weight=1)
        await proxy.put_route(place, model=CLAUDE)
        await proxy.put_route(target("one"))
        yield AnthropicWorld(proxy=proxy, vendor=vendor, backend=backend, store=store)
