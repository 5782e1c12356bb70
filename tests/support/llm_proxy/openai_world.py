"""A proxy before OpenAI, Azure OpenAI, a server of chat completions only, and an engine whose tokens are captured."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target
from tests.support.llm_proxy.vendors.openai import API_VERSION, KEY, OpenAiVendor

GPT = "gpt"
AZURE = "gpt-azure"
CHAT_ONLY = "gpt-chat"
VENDOR_MODEL = "gpt-tests"

_EVERY_API = [
    backend_pb2.API_CHAT_COMPLETIONS,
    backend_pb2.API_COMPLETIONS,
    backend_pb2.API_RESPONSES,
    backend_pb2.API_EMBEDDINGS,
]


@dataclass(frozen=True, kw_only=True)
class OpenAiWorld:
    """What a test of the OpenAI dialect plays with."""

    proxy: RunningProxy
    vendor: OpenAiVendor
    backend: Backend
    store: FakeStore

    def agent(self, key: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        """Returns the vendor's own client, which knows nothing of the proxy but its address."""
        return openai.AsyncOpenAI(base_url=self.proxy.url, api_key=key or self.key(), **{"max_retries": 0} | options)

    def key(self) -> str:
        """Returns the key of a new attempt."""
        return self.proxy.attempt()[1]


@asynccontextmanager
async def openai_world(store: FakeStore, backend: Backend, **settings: Any) -> AsyncIterator[OpenAiWorld]:
    """Runs the vendor and the proxy, with the routes `gpt`, `gpt-azure`, `gpt-chat` and the trainable `tiny`.

    Nothing is tried again unless the settings say so: tests see each refusal as it is.
    """
    plain = {"returns_token_ids": False, "key_name": "vendor"}
    async with (
        OpenAiVendor(models=(VENDOR_MODEL,)) as vendor,
        running_proxy(store.target, **{"backend_keys": {"vendor": KEY}, "retry_deadline_s": 0} | settings) as proxy,
    ):
        await proxy.register("openai", vendor.url, apis=_EVERY_API, **plain)
        azure = {"dialect": backend_pb2.DIALECT_AZURE_OPENAI, "api_version": API_VERSION}
        await proxy.register("azure", vendor.root, apis=_EVERY_API, **azure, **plain)
        await proxy.register("chat-only", vendor.url, apis=[backend_pb2.API_CHAT_COMPLETIONS], **plain)
        await proxy.register("one", backend.url)
        for model, backend_id in ((GPT, "openai"), (AZURE, "azure"), (CHAT_ONLY, "chat-only")):
            place = route_pb2.RouteTarget(backend=f"backends/{backend_id}", backend_model=VENDOR_MODEL, weight=1)
            await proxy.put_route(place, model=model)
        await proxy.put_route(target("one"))
        yield OpenAiWorld(proxy=proxy, vendor=vendor, backend=backend, store=store)
