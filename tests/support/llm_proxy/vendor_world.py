"""A proxy before both vendors, a server of chat completions only, and an engine whose tokens are captured."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttpxClient
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.vendors.anthropic import KEY as ANTHROPIC_KEY
from tests.support.llm_proxy.vendors.anthropic import MODEL as ANTHROPIC_MODEL
from tests.support.llm_proxy.vendors.anthropic import AnthropicVendor
from tests.support.llm_proxy.vendors.openai import API_VERSION, KEY, Fault, OpenAiVendor

GPT: Final = "gpt"
AZURE: Final = "gpt-azure"
CHAT_ONLY: Final = "gpt-chat"
CLAUDE: Final = "claude"
ENGINE: Final = MODEL
VENDOR_MODEL: Final = "gpt-tests"

EVERY_OPENAI_API: Final = [
    backend_pb2.API_CHAT_COMPLETIONS,
    backend_pb2.API_COMPLETIONS,
    backend_pb2.API_RESPONSES,
    backend_pb2.API_EMBEDDINGS,
]


# A context of their own would read every certificate of the machine, for each client; none goes over TLS.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True, kw_only=True)
class VendorWorld:
    """The proxy, and what stands behind it."""

    proxy: RunningProxy
    openai: OpenAiVendor
    anthropic: AnthropicVendor
    backend: Backend
    store: FakeStore

    @property
    def anthropic_url(self) -> str:
        """The base URL of an Anthropic client."""
        return self.proxy.url.removesuffix("/v1")

    def openai_agent(self, key: str | None = None, **options: Any) -> AsyncOpenAI:
        """Returns OpenAI's own client; all it knows of the proxy is the address."""
        usual: dict[str, Any] = {"base_url": self.proxy.url, "max_retries": 0}
        usual |= {"http_client": DefaultAsyncHttpxClient(verify=NO_TLS)}
        return AsyncOpenAI(api_key=key or self.key(), **(usual | options))

    def anthropic_agent(self, key: str | None = None, **options: Any) -> AsyncAnthropic:
        """Returns Anthropic's own client; all it knows of the proxy is the address."""
        usual: dict[str, Any] = {"max_retries": 0, "http_client": AnthropicHttpxClient(verify=NO_TLS)}
        return AsyncAnthropic(base_url=self.anthropic_url, api_key=key or self.key(), **(usual | options))

    def key(self) -> str:
        """Returns the key of a new attempt."""
        return self.proxy.attempt()[1]

    def refuse(self, model: str, status: int, *, retry_after: str = "3600") -> None:
        """Lets the next call of a model be refused by its backend."""
        match model:
            case "claude" | "tiny":
                switches = self.anthropic.switches if model == CLAUDE else self.backend.switches
                switches.refusals.append(status)
                switches.retry_after = retry_after
            case _:
                self.openai.faults.append(Fault(status=status, headers={"Retry-After": retry_after}))

    def break_stream(self, model: str, *, after: int, with_error: bool) -> None:
        """Lets streams of a model's backend end after so many events, with an error or with the connection."""
        if model in (CLAUDE, ENGINE):
            switches = self.anthropic.switches if model == CLAUDE else self.backend.switches
            setattr(switches, "error_after_events" if with_error else "cut_after_events", after)
        else:
            setattr(self.openai, "error_after" if with_error else "cut_after", after)


@asynccontextmanager
async def vendor_world(store: FakeStore, backend: Backend, **settings: Any) -> AsyncIterator[VendorWorld]:
    """Runs the vendors and the proxy, with a route to each and the trainable `tiny`.

    Failed calls are not retried unless the settings say so.
    """
    keys: dict[str, Any] = {
        "backend_keys": {
            name: {"key": key, "hosts": ["127.0.0.1"]} for name, key in (("openai", KEY), ("anthropic", ANTHROPIC_KEY))
        },
        "retry_deadline_s": 0,
    }
    async with (
        OpenAiVendor(models=(VENDOR_MODEL,)) as gpt,
        AnthropicVendor() as claude,
        running_proxy(store.target, **keys | settings) as proxy,
    ):
        plain = {"returns_token_ids": False, "key_name": "openai"}
        azure = {"dialect": backend_pb2.DIALECT_AZURE_OPENAI, "api_version": API_VERSION}
        messages = {"dialect": backend_pb2.DIALECT_ANTHROPIC, "key_name": "anthropic"}
        await proxy.register("openai", gpt.url, apis=EVERY_OPENAI_API, **plain)
        await proxy.register("azure", gpt.root, apis=EVERY_OPENAI_API, **azure, **plain)
        await proxy.register("chat-only", gpt.url, apis=[backend_pb2.API_CHAT_COMPLETIONS], **plain)
        await proxy.register("anthropic", claude.url, **plain | messages)
        await proxy.register("one", backend.url)
        for model, backend_id in ((GPT, "openai"), (AZURE, "azure"), (CHAT_ONLY, "chat-only"), (CLAUDE, "anthropic")):
            served = ANTHROPIC_MODEL if model == CLAUDE else VENDOR_MODEL
            await proxy.put_route(
                route_pb2.RouteTarget(backend=f"backends/{backend_id}", backend_model=served, weight=1), model=model
            )
        await proxy.put_route(target("one"))
        yield VendorWorld(proxy=proxy, openai=gpt, anthropic=claude, backend=backend, store=store)
