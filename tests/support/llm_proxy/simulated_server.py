"""The simulated engine behind HTTP: chat completions, whole and streamed, health, and metrics under vLLM's names."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from tests.support.llm_proxy.backend import JSON
from tests.support.llm_proxy.simulated_engine import BLOCK_TOKENS, Generation, SimulatedEngine, Timings

_PIECE_TOKENS = 32
_MAX_BODY_BYTES = 16 * 1024 * 1024


def prompt_of(messages: list[JSON]) -> bytes:
    """Returns the text of a prompt; a conversation that goes on begins with the text of the one before."""
    return "".join(f"<{one['role']}>{one['content']}" for one in messages).encode() + b"<assistant>"


class SimulatedServer:
    """A server of one engine; with a key, it asks for it at every path but `/health`, as Fulmen's plug-in of vLLM does."""

    def __init__(self, timings: Timings, *, key: str = "") -> None:
        self.engine = SimulatedEngine(timings)
        self.url = ""
        self._key = key

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedServer]:
        """Serves on a free port."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        steps = asyncio.create_task(self.engine.run(), name="engine-steps")
        try:
            yield self
        finally:
            steps.cancel()
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = self._key and request.path != "/health"
        if asked and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.Response(status=401)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        engine, labels = self.engine, '{engine="0",model_name="simulated"}'
        size = engine.cache.size
        config = f'block_size="{BLOCK_TOKENS}",kv_cache_size_tokens="{size * BLOCK_TOKENS}",num_gpu_blocks="{size}"'
        lines = [
            f"vllm:num_requests_running{labels} {len(engine.running)}",
            f"vllm:num_requests_waiting{labels} {len(engine.waiting)}",
            f"vllm:kv_cache_usage_perc{labels} {engine.cache.used_blocks / size}",
            f"vllm:prefix_cache_queries_total{labels} {engine.queried_tokens}",
            f"vllm:prefix_cache_hits_total{labels} {engine.hit_tokens}",
            f"vllm:cache_config_info{{{config}}} 1.0",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        made: asyncio.Queue[int] = asyncio.Queue()
        generation = Generation(prompt=prompt_of(body["messages"]), tokens=body["max_tokens"], on_token=made.put_nowait)
        self.engine.submit(generation)
        try:
            if body.get("stream"):
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                with contextlib.suppress(ConnectionResetError):  # the caller has gone
                    await response.prepare(request)
                    await self._stream(response, generation, made)
                return response
            while await made.get() < generation.tokens:
                pass
            message = {"role": "assistant", "content": generation.answer.decode()}
            choice = {"index": 0, "finish_reason": "length", "message": message}
            return web.json_response({"choices": [choice], "usage": _usage(generation)})
        finally:
            self.engine.abort(generation)

    async def _stream(self, response: web.StreamResponse, generation: Generation, made: asyncio.Queue[int]) -> None:
        """Streams the first token at once, further ones by pieces: their number is not what is measured."""
        text, sent = generation.answer.decode(), 0
        while sent < generation.tokens:
            tokens = await made.get()
            if not sent or tokens - sent >= _PIECE_TOKENS or tokens == generation.tokens:
                piece = text[sent * 4 : tokens * 4]
                sent = tokens
                delta = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
                await response.write(_event({"choices": [delta]}))
        end = {"index": 0, "delta": {}, "finish_reason": "length"}
        await response.write(_event({"choices": [end]}) + _event({"choices": [], "usage": _usage(generation)}))
        await response.write(b"data: [DONE]\n\n")


def _event(document: JSON) -> bytes:
    head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "simulated"}
    return b"data: " + json.dumps(head | document).encode() + b"\n\n"


def _usage(generation: Generation) -> JSON:
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.tokens,
        "total_tokens": generation.prompt_tokens + generation.tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached},
    }
