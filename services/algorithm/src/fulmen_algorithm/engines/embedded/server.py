"""HTTP API of the engine: OpenAI chat completions, scores of given tokens, and weight swaps.

Invariant: everything that takes longer than a millisecond runs in a thread and not on the event loop.
"""

import asyncio
import hmac
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, time
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from fulmen_algorithm.engines.embedded.adapters import prepare_adapters
from fulmen_algorithm.engines.embedded.chat import ChatRenderer, Completion
from fulmen_algorithm.engines.embedded.generator import Generator
from fulmen_algorithm.engines.embedded.protocol import (
    ChatRequest,
    EngineError,
    InvalidRequest,
    LoadOrder,
    ModelNotFound,
    Overloaded,
    Unauthorized,
    parse_chat_request,
    parse_weights_order,
)
from fulmen_algorithm.engines.embedded.sampling import SampledToken
from fulmen_algorithm.engines.embedded.scoring import parse_score_request, score_answer
from fulmen_algorithm.engines.embedded.text import TextStream
from fulmen_algorithm.engines.embedded.weights import Prepared, prepare_delta, prepare_full
from fulmen_algorithm.training.settings import WeightsKind

RETRY_AFTER_S = 1
MAX_BODY_BYTES = 16 * 2**20
SWAP_DEADLINE_S = 300.0
_ENCODER = msgspec.json.Encoder()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """Routes of one engine.

    Attributes:
        generator: Owns the model; already started.
        renderer: Chat template and context length.
        model_names: Adapter by served model name, empty for none; requests for other names are refused.
        token: Bearer token required by every route but /health; None for none (loopback only).
        swap_lock: Serialises swaps, in order of arrival.
    """

    generator: Generator
    renderer: ChatRenderer
    model_names: Mapping[str, str]
    token: str | None
    swap_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def application(self) -> web.Application:
        """Builds the aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._score)
        app.router.add_get("/admin/weights", self._weights)
        app.router.add_post("/admin/weights", self._load_weights)
        app.router.add_get("/admin/stats", self._stats)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the token and renders refusals."""
        try:
            hosts = len(request.headers.getall("Host", ()))
            if hosts > 1 or (not hosts and request.version >= HttpVersion11):
                raise InvalidRequest("request needs one host")
            if request.path != "/health":
                self._authorize(request)
            return await handler(request)
        except EngineError as error:
            headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, Overloaded) else None
            return _json(error.body(), status=error.status, headers=headers)

    def _authorize(self, request: web.Request) -> None:
        if self.token is None:
            return
        expected = f"Bearer {self.token}".encode()
        given = request.headers.getall("Authorization", ())
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(errors="replace"), expected):
            raise Unauthorized("The bearer token is missing or wrong.")

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok", "version": self.generator.version})

    async def _models(self, _: web.Request) -> web.Response:
        models = [
            {"id": name, "object": "model", "created": int(time()), "owned_by": "fulmen"} for name in self.model_names
        ]
        return _json({"object": "list", "data": models})

    async def _stats(self, _: web.Request) -> web.Response:
        return _json({**asdict(self.generator.stats), "waiting": self.generator.waiting})

    async def _weights(self, _: web.Request) -> web.Response:
        return _json({"version": self.generator.version, "sha256": self.generator.served.sha256})

    async def _load_weights(self, request: web.Request) -> web.Response:
        order = parse_weights_order(await _read_json(request))
        async with self.swap_lock, asyncio.timeout(SWAP_DEADLINE_S):
            started = perf_counter()
            # Read before the pause, in a separate thread, since the model thread is generating.
            weights = await asyncio.to_thread(self._prepare, order)
            load_seconds = perf_counter() - started
            pause_seconds = await self.generator.swap(weights, order.version)
        metrics = {"load_seconds": load_seconds, "pause_seconds": pause_seconds, "size_bytes": weights.size_bytes}
        return _json({"version": order.version, "sha256": self.generator.served.sha256, **metrics})

    def _prepare(self, order: LoadOrder) -> Prepared:
        model = self.generator.model
        match order.kind:
            case WeightsKind.FULL:
                return prepare_full(model, order.path, order.sha256)
            case WeightsKind.DELTA:
                return prepare_delta(model, self.generator.served, order.path, order.sha256)
            case WeightsKind.LORA:
                return prepare_adapters(model, order.adapters, order.sha256)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat = parse_chat_request(await _read_json(request))
        if chat.model not in self.model_names:
            raise ModelNotFound(f"The model {chat.model!r} does not exist.", param="model", code="model_not_found")
        prompt_ids = self.renderer.prompt_ids(chat)
        room = self.renderer.max_model_tokens - len(prompt_ids)
        completion = self._completion(chat, prompt_ids, min(chat.sampling.max_tokens, room))
        if chat.stream:
            return await self._stream(request, completion)
        await self._run(completion, completion.push)
        return _json(completion.answer())

    async def _score(self, request: web.Request) -> web.Response:
        embeddings: Any = self.generator.model.get_input_embeddings()
        asked = parse_score_request(
            await _read_json(request),
            max_model_tokens=self.renderer.max_model_tokens,
            vocabulary=int(embeddings.weight.shape[0]),
        )
        if asked.model not in self.model_names:
            raise ModelNotFound(f"The model {asked.model!r} does not exist.", param="model", code="model_not_found")
        logprobs = await self.generator.score(asked.token_ids, adapter=self.model_names[asked.model])
        return _json(score_answer(asked, logprobs, answer_id=f"cmpl-{uuid.uuid4().hex}", created=int(time())))

    def _completion(self, chat: ChatRequest, prompt_ids: list[int], max_tokens: int) -> Completion:
        tokenizer = self.renderer.tokenizer
        return Completion(
            request=chat,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            eos_token_ids=self.generator.eos_token_ids,
            text=TextStream(tokenizer.backend_tokenizer, stop=chat.sampling.stop, expect_tool_calls=bool(chat.tools)),
            tokenizer=tokenizer,
        )

    async def _run(self, completion: Completion, on_token: Callable[[SampledToken], bool]) -> None:
        sampling = replace(completion.request.sampling, max_tokens=completion.max_tokens)
        adapter = self.model_names[completion.request.model]
        await self.generator.generate(completion.prompt_ids, sampling, on_token, adapter=adapter)

    async def _stream(self, request: web.Request, completion: Completion) -> web.StreamResponse:
        """Sends tokens as they are sampled; the status line waits for the first one, so that refusals have one."""
        loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[tuple[SampledToken, str] | None] = asyncio.Queue()

        def on_token(token: SampledToken) -> bool:
            ended = completion.push(token)
            piece = "" if ended else completion.text.drain()
            loop.call_soon_threadsafe(outbox.put_nowait, (token, piece))
            return ended

        running = asyncio.create_task(self._run(completion, on_token), name=f"generate-{completion.id}")
        running.add_done_callback(lambda _: outbox.put_nowait(None))
        try:
            item = await outbox.get()
            if item is None:
                await running  # raises the refusal
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            await response.write(_event(completion.first_chunk()))
            while item is not None:
                token, piece = item
                await response.write(_event(completion.chunk([token], piece)))
                item = await outbox.get()
            await self._finish_stream(response, completion, running)
            return response
        finally:
            running.cancel()

    async def _finish_stream(
        self, response: web.StreamResponse, completion: Completion, running: "asyncio.Task[None]"
    ) -> None:
        try:
            await running
        except EngineError as error:
            # The status was already sent: the stream has the error instead of [DONE].
            await response.write(_event(error.body()))
            await response.write_eof()
            return
        await response.write(_event(completion.last_chunk()))
        if completion.request.include_usage:
            await response.write(_event(completion.usage_chunk()))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()


async def _read_json(request: web.Request) -> Any:
    try:
        return msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}") from error


def _json(body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_ENCODER.encode(body), status=status, headers=headers, content_type="application/json")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _ENCODER.encode(body) + b"\n\n"
