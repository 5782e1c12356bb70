"""A proxy before a backend that does what a test says, and callers that send what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest_asyncio
from hypothesis import HealthCheck, settings

from fulmen.llm_proxy.v1 import backend_pb2, capture_service_pb2, route_pb2
from fulmen_llm_proxy.apis.registry import BY_PATH
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.rogue_backend import (
    CHAT,
    COMPLETIONS,
    COUNT,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    RogueBackend,
    serve_well,
)
from tests.support.llm_proxy.vendors.errors import error_of

DEADLINE_S: Final = 30
BACKEND_KEY: Final = "the-key-of-the-backend"
PROMPT: Final = "the-words-of-the-prompt"

OPENAI, CLAUDE, CHAT_ONLY = "gpt", "claude", "chat-only"
TINY = MODEL
"""The route whose calls are captured for training."""

NATIVE: Final = {
    CHAT: OPENAI, COMPLETIONS: OPENAI, RESPONSES: OPENAI, EMBEDDINGS: OPENAI, MESSAGES: CLAUDE, COUNT: CLAUDE
}  # fmt: skip
"""The route on which a path's calls are passed on as they are."""

WAYS: Final = (
    *NATIVE.items(),
    (MESSAGES, CHAT_ONLY),
    (RESPONSES, CHAT_ONLY),
    (CHAT, CLAUDE),
    (CHAT, TINY),
    (MESSAGES, TINY),
)
"""Every path, passed on, translated and captured."""

STREAMED: Final = tuple((path, model) for path, model in WAYS if path not in (EMBEDDINGS, COUNT))

_TURNS = [{"role": "user", "content": PROMPT}]
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"messages": _TURNS},
    COMPLETIONS: {"prompt": PROMPT},
    RESPONSES: {"input": PROMPT},
    EMBEDDINGS: {"input": PROMPT},
    MESSAGES: {"messages": _TURNS, "max_tokens": 9},
    COUNT: {"messages": _TURNS},
}

bounded = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""For property tests over a shared proxy: the same examples each time."""

_EVERY_OPENAI_API = [
    backend_pb2.API_CHAT_COMPLETIONS,
    backend_pb2.API_COMPLETIONS,
    backend_pb2.API_RESPONSES,
    backend_pb2.API_EMBEDDINGS,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a caller got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """What a program reads of an error."""
        return str(json.loads(self.body)["error"]["code"])


@dataclass(frozen=True, kw_only=True)
class RogueWorld:
    """What a test of bad callers and bad backends plays with."""

    proxy: RunningProxy
    backend: RogueBackend
    store: FakeStore

    @property
    def port(self) -> int:
        """Where the proxy speaks HTTP."""
        return self.proxy.parts.ports["http_port"]

    async def post(self, path: str, body: Any, key: str, **headers: str) -> Answer:
        """Makes one call with a body of whatever bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        sent = {"Authorization": f"Bearer {key}", **headers}
        async with asyncio.timeout(DEADLINE_S), self.proxy.http.post(url, data=data, headers=sent) as answer:
            return Answer(status=answer.status, headers=answer.headers, body=await answer.read())

    async def exchange(self, *pieces: bytes, eof: bool = False) -> bytes:
        """Sends bytes on a connection of their own; returns everything that comes back until its end."""
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                if eof:
                    writer.write_eof()
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

    def told(self, path: str, answer: Answer) -> str:
        """Checks that an answer is one error in the dialect of its path that tells no secret; returns its code."""
        error_of(BY_PATH[path].dialect, answer.status, answer.headers, answer.body)
        for secret in (BACKEND_KEY.encode(), PROMPT.encode(), b"127.0.0.1", b"/site-packages", b"Traceback", b".py"):
            assert secret not in answer.body, answer.body
        return answer.code

    async def is_well(self, attempt: str = "") -> capture_service_pb2.CaptureSummary | None:
        """Checks that nothing is stuck: no call runs, an attempt's account is settled, and calls are answered."""
        summary = await self.proxy.flush(attempt) if attempt else None
        assert summary is None or summary.flushed
        async with asyncio.timeout(DEADLINE_S):
            while self.in_flight:  # noqa: ASYNC110 - a figure, not an event
                await asyncio.sleep(0)
        self.backend.next_acts.clear()
        for path, model in ((CHAT, OPENAI), (MESSAGES, CLAUDE)):
            answer = await self.post(path, REQUESTS[path] | {"model": model}, self.key())
            assert answer.status == 200, answer.body
        return summary

    @property
    def in_flight(self) -> float:
        """Calls that run."""
        value = self.proxy.registry.get_sample_value("fulmen_llm_proxy_calls_in_flight")
        assert value is not None
        return value

    def key(self) -> str:
        """Returns the key of a new attempt."""
        return self.proxy.attempt()[1]


@asynccontextmanager
async def rogue_world(**settings: Any) -> AsyncIterator[RogueWorld]:
    """Runs a store, the backend and the proxy, with a route for each way in which calls are passed on."""
    base: dict[str, Any] = {
        "backend_keys": {"vendor": {"key": BACKEND_KEY, "hosts": ["127.0.0.1"]}},
        "health_interval_s": 300,
    }
    async with (
        FakeStore() as store,
        RogueBackend() as backend,
        running_proxy(store.target, **(base | settings)) as proxy,
    ):
        plain = {"returns_token_ids": False, "key_name": "vendor"}
        await proxy.register("openai", backend.url, apis=_EVERY_OPENAI_API, **plain)
        await proxy.register("anthropic", backend.url, dialect=backend_pb2.DIALECT_ANTHROPIC, **plain)
        await proxy.register("chat-only", backend.url, apis=[backend_pb2.API_CHAT_COMPLETIONS], **plain)
        await proxy.register("engine", backend.url, apis=[backend_pb2.API_CHAT_COMPLETIONS], key_name="vendor")
        for model, backend_id in ((OPENAI, "openai"), (CLAUDE, "anthropic"), (CHAT_ONLY, "chat-only")):
            place = route_pb2.RouteTarget(backend=f"backends/{backend_id}", backend_model=model, weight=1)
            await proxy.put_route(place, model=model)
        await proxy.put_route(target("engine"), model=TINY)
        yield RogueWorld(proxy=proxy, backend=backend, store=store)


def rogue_fixtures(**settings: Any) -> tuple[Any, Any]:
    """Returns the fixtures `shared` and `world` of a module: one proxy, checked after each test to be idle and serving."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def shared() -> AsyncIterator[RogueWorld]:
        async with rogue_world(**settings) as running:
            yield running

    @pytest_asyncio.fixture(loop_scope="module")
    async def world(shared: RogueWorld) -> AsyncIterator[RogueWorld]:
        shared.backend.act = serve_well
        yield shared
        shared.backend.act = serve_well
        await shared.is_well()

    return shared, world


def request_of(path: str, model: str) -> dict[str, Any]:
    """Returns a good request."""
    return {"model": model, **REQUESTS[path]}


def head_of(path: str, key: str, *lines: bytes, version: bytes = b"1.1", method: bytes = b"POST") -> bytes:
    """Returns the head of a request, with more lines of it."""
    first = method + b" " + path.encode("latin-1") + b" HTTP/" + version
    return b"\r\n".join([first, b"host: x", b"authorization: Bearer " + key.encode(), *lines]) + b"\r\n\r\n"


def sized(body: bytes) -> bytes:
    """Returns the line of a head that tells a body's length."""
    return b"content-length: %d" % len(body)


def answers_in(received: bytes) -> list[Answer]:
    """Takes the answers of one connection apart; whatever is not whole fails."""
    found = []
    while received:
        head, separator, received = received.partition(b"\r\n\r\n")
        assert separator, head
        lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = lines[0].split(" ")
        assert version == "HTTP/1.1", lines[0]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if int(status) < 200:
            found.append(Answer(status=int(status), headers=headers, body=b""))
            continue
        if "chunked" in headers.get("transfer-encoding", ""):
            body, received = _unchunked(received)
        else:
            size = int(headers["content-length"])
            assert len(received) >= size
            body, received = received[:size], received[size:]
        found.append(Answer(status=int(status), headers=headers, body=body))
    return found


def _unchunked(received: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, separator, received = received.partition(b"\r\n")
        assert separator, "the stream does not end"
        length = int(size, 16)
        body += received[:length]
        assert received[length : length + 2] == b"\r\n"
        received = received[length + 2 :]
        if length == 0:
            return body, received
