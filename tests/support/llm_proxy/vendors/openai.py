"""A fake of OpenAI, and of Azure OpenAI, on a real socket.

Its answers are made of the vendor's own typed models, and it takes the requests that the package's
parameter types allow, so that what passes here has the vendor's shapes. Its model is simple and
foretellable (`openai_turns`). It has switches for the ways in which the vendor refuses and fails.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from aiohttp import web
from openai.types import CreateEmbeddingResponse, Model

from tests.support.llm_proxy.vendors import openai_shapes as shapes
from tests.support.llm_proxy.vendors.openai_chat import CREATED, ChatAnswer, TextAnswer
from tests.support.llm_proxy.vendors.openai_responses import ResponseAnswer

JSON = dict[str, Any]
KEY = "sk-vendor"
API_VERSION = "2026-05-01"
EMBEDDING = [0.5, -0.25, 1.0]
_DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """An answer that can be sent whole or as events."""

    def whole(self) -> JSON:
        """Returns the whole answer."""
        ...

    def events(self) -> Iterator[JSON]:
        """Yields the events."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A refusal, as the vendor words them."""

    status: int
    message: str = "The vendor says no."
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request as it arrived."""

    path: str
    query: dict[str, str]
    body: JSON
    headers: dict[str, str]


class OpenAiVendor:
    """The vendor; `async with OpenAiVendor() as vendor` runs one in the current event loop.

    Attributes:
        faults: refusals of the next calls, in order.
        cut_after: closes the next stream after that many events.
        error_after: sends an error within the next stream after that many events.
        also: request fields that it takes beside its own.
        kept: responses that it keeps, by id.
    """

    def __init__(self, *, models: tuple[str, ...] = ("gpt-tests",)) -> None:
        self.models = models
        self.faults: deque[Fault] = deque()
        self.cut_after: int | None = None
        self.error_after: int | None = None
        self.also: frozenset[str] = frozenset()
        self.received: list[Received] = []
        self.kept: dict[str, JSON] = {}
        self._answers = 0
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def root(self) -> str:
        """The address without a path: what an Azure backend's `base_url` is."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """The base URL, with the version of the API."""
        return f"{self.root}/v1"

    async def __aenter__(self) -> OpenAiVendor:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        for prefix in ("/v1", "/openai/deployments/{deployment}", "/openai"):
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/completions", self._completions)
            app.router.add_post(f"{prefix}/embeddings", self._embeddings)
            app.router.add_post(f"{prefix}/responses", self._responses)
            app.router.add_get(f"{prefix}/responses/{{id}}", self._kept_response)
            app.router.add_delete(f"{prefix}/responses/{{id}}", self._delete_response)
            app.router.add_get(f"{prefix}/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _admitted(self, request: web.Request, shape: shapes.RequestShape | None) -> JSON:
        """Returns the body of a good request.

        Raises:
            web.HTTPException: with the vendor's error document, for any other.
        """
        body = await request.json() if request.can_read_body else {}
        self.received.append(
            Received(path=request.path, query=dict(request.query), body=body, headers=dict(request.headers))
        )
        azure = request.path.startswith("/openai")
        if azure and "api-version" not in request.query:
            _refuse(Fault(status=404, code="404", message="Resource not found"))
        given = request.headers.get("api-key" if azure else "Authorization", "")
        if given != (KEY if azure else f"Bearer {KEY}"):
            _refuse(Fault(status=401, code="invalid_api_key", message="Incorrect API key provided."))
        if self.faults:
            _refuse(self.faults.popleft())
        if shape is None:
            return body
        fault = shape.fault(body, also=self.also)
        if fault is not None:
            _refuse(Fault(status=400, message=fault))
        body["model"] = request.match_info.get("deployment", body["model"])
        if body["model"] not in self.models:
            message = f"The model `{body['model']}` does not exist or you do not have access to it."
            _refuse(Fault(status=404, code="model_not_found", message=message))
        self._answers += 1
        return body

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._admitted(request, shapes.CHAT)
        return await self._answer(request, body, ChatAnswer(body, self._id()), named=False)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._admitted(request, shapes.COMPLETIONS)
        return await self._answer(request, body, TextAnswer(body, self._id()), named=False)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await self._admitted(request, shapes.RESPONSES)
        before = body.get("previous_response_id")
        if before is not None and before not in self.kept:
            message = f"Previous response with id '{before}' not found."
            _refuse(
                Fault(status=400, code="previous_response_not_found", message=message, param="previous_response_id")
            )
        answer = ResponseAnswer(body, self._id())
        if body.get("store") is not False:
            whole = answer.whole()
            self.kept[whole["id"]] = whole
        return await self._answer(request, body, answer, named=True)

    async def _kept_response(self, request: web.Request) -> web.StreamResponse:
        await self._admitted(request, None)
        return web.json_response(self._found(request))

    async def _delete_response(self, request: web.Request) -> web.StreamResponse:
        await self._admitted(request, None)
        found = self.kept.pop(self._found(request)["id"])
        return web.json_response({"id": found["id"], "object": "response", "deleted": True})

    def _found(self, request: web.Request) -> JSON:
        name = request.match_info["id"]
        found = self.kept.get(name)
        if found is None:
            _refuse(Fault(status=404, message=f"Response with id '{name}' not found."))
        return found

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await self._admitted(request, shapes.EMBEDDINGS)
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        packed = base64.b64encode(struct.pack(f"<{len(EMBEDDING)}f", *EMBEDDING)).decode()
        document = shapes.shaped(
            CreateEmbeddingResponse,
            {
                "object": "list",
                "model": body["model"],
                "data": [
                    {"object": "embedding", "index": index, "embedding": EMBEDDING} for index in range(len(texts))
                ],
                "usage": {"prompt_tokens": len(texts), "total_tokens": len(texts)},
            },
        )
        if body.get("encoding_format") == "base64":
            for entry in document["data"]:
                entry["embedding"] = packed
        return web.json_response(document)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        await self._admitted(request, None)
        served = [{"id": name, "object": "model", "created": CREATED, "owned_by": "system"} for name in self.models]
        return web.json_response({"object": "list", "data": [shapes.shaped(Model, document) for document in served]})

    def _id(self) -> str:
        return f"{id(self):x}{self._answers:04d}"

    async def _answer(self, request: web.Request, body: JSON, answer: Answer, *, named: bool) -> web.StreamResponse:
        headers = {"x-request-id": f"req_{self._answers}", "openai-processing-ms": "5", "openai-version": "2020-10-01"}
        if not body.get("stream"):
            return web.json_response(answer.whole(), headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
        await response.prepare(request)
        cut, self.cut_after = self.cut_after, None
        broken, self.error_after = self.error_after, None
        for position, event in enumerate(answer.events()):
            if position == cut:
                assert request.transport is not None
                request.transport.abort()
                return response
            if position == broken:
                await response.write(_error_event(position, named=named))
                await response.write_eof()
                return response
            name = f"event: {event['type']}\n" if named else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0)
        if not named:
            await response.write(_DONE)
        await response.write_eof()
        return response


def _error_event(position: int, *, named: bool) -> bytes:
    message = "The server had an error while processing your request."
    if named:
        event = {
            "type": "error",
            "sequence_number": position,
            "code": "server_error",
            "message": message,
            "param": None,
        }
        return b"event: error\ndata: %s\n\n" % json.dumps(shapes.response_event(event)).encode()
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return b"data: %s\n\n" % json.dumps({"error": error}).encode()


def _refuse(fault: Fault) -> NoReturn:
    error = {"message": fault.message, "type": fault.type, "param": fault.param, "code": fault.code}
    kinds: dict[int, Any] = {
        kind.status_code: kind for kind in vars(web).values() if isinstance(kind, type) and hasattr(kind, "status_code")
    }
    raise kinds[fault.status](text=json.dumps({"error": error}), content_type="application/json", headers=fault.headers)
