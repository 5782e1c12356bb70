"""Fakes of vendors with APIs of their own, on real sockets: Gemini, Cohere, Bedrock, as their documentation describes the wire.

Each calls the tool `add` if it is offered and has not answered yet, and otherwise says `Hello!` in three pieces.
"""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

__all__ = [
    "PIECES",
    "PROMPT_TOKENS",
    "TOKENS",
    "BedrockVendor",
    "CohereVendor",
    "Fault",
    "GeminiVendor",
    "NativeVendor",
    "VertexVendor",
]

JSON = dict[str, Any]

PIECES: Final = ("Hel", "lo", "!")
PROMPT_TOKENS: Final = 11
TOKENS: Final = 3
ADDENDS: Final = {"a": 1, "b": 2}
EMBEDDING: Final = [0.5, -0.25, 1.0]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A refusal."""

    status: int
    message: str = "The vendor says no."
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Received:
    """A request as it arrived."""

    path: str
    headers: Mapping[str, str]
    body: JSON


class NativeVendor:
    """What the fakes have in common: the socket, what arrived, and switches.

    Attributes:
        received: the last requests.
        faults: refusals of the next requests.
        hangs: whether requests stay without an answer.
        pause: streams wait for it after their first piece.
        left: set when a client has left before its answer.
        padding: more text of whole answers.
        port: of its socket.
    """

    CONTENT_TYPE: ClassVar[str] = "text/event-stream"

    def __init__(self) -> None:
        self.received: deque[Received] = deque(maxlen=100)
        self.faults: deque[Fault] = deque()
        self.hangs = False
        self.pause = asyncio.Event()
        self.pause.set()
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        self.padding = ""
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.content_type == "application/json" else dict(await request.post())
        self.received.append(Received(path=request.path_qs, headers=dict(request.headers), body=body))
        self.arrived.set()
        if self.faults:
            fault = self.faults.popleft()
            return web.json_response(self.refusal(fault), status=fault.status, headers=fault.headers)
        try:
            if self.hangs:
                await asyncio.Event().wait()
            if not self.is_stream(request.path, body):
                return web.json_response(self.whole(request.path, body))
            return await self._stream(request, body)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _stream(self, request: web.Request, body: JSON) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": self.CONTENT_TYPE})
        await answer.prepare(request)
        for number, event in enumerate(self.events(body)):
            if number == 2:
                await self.pause.wait()
            await answer.write(event)
        await answer.write_eof()
        return answer

    def is_stream(self, path: str, body: JSON) -> bool:
        """Returns whether a request asks for a stream."""
        raise NotImplementedError

    def whole(self, path: str, body: JSON) -> JSON:
        """Returns a whole answer."""
        raise NotImplementedError

    def events(self, body: JSON) -> Iterator[bytes]:
        """Yields a stream."""
        raise NotImplementedError

    def refusal(self, fault: Fault) -> JSON:
        """Returns a refusal in the vendor's words."""
        return {"message": fault.message}

    @property
    def text(self) -> str:
        """What it says."""
        return "".join(PIECES) + self.padding


def _sse(event: JSON) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


class GeminiVendor(NativeVendor):
    """Google's `generateContent`, `streamGenerateContent` and `batchEmbedContents`. Source: ai.google.dev/api."""

    _USAGE: Final = {
        "promptTokenCount": PROMPT_TOKENS, "candidatesTokenCount": TOKENS, "totalTokenCount": PROMPT_TOKENS + TOKENS
    }  # fmt: skip

    def is_stream(self, path: str, body: JSON) -> bool:
        return path.endswith(":streamGenerateContent")

    def whole(self, path: str, body: JSON) -> JSON:
        if path.endswith(":batchEmbedContents"):
            return {"embeddings": [{"values": EMBEDDING} for _ in body["requests"]]}
        return self._answer(self._parts(body), end="STOP")

    def events(self, body: JSON) -> Iterator[bytes]:
        parts = self._parts(body)
        if "functionCall" in parts[0]:
            yield _sse(self._answer(parts, end="STOP"))
            return
        for piece in PIECES[:-1]:
            yield _sse(self._answer([{"text": piece}]))
        yield _sse(self._answer([{"text": PIECES[-1] + self.padding}], end="STOP"))

    def _parts(self, body: JSON) -> list[JSON]:
        answered = any(
            part.keys() & {"functionResponse", "function_response"}
            for turn in body["contents"]
            for part in turn["parts"]
        )
        if body.get("tools") and not answered:
            return [{"functionCall": {"name": "add", "args": ADDENDS}}]
        return [{"text": self.text}]

    def _answer(self, parts: list[JSON], *, end: str = "") -> JSON:
        candidate: JSON = {"content": {"role": "model", "parts": parts}, "index": 0}
        return {"candidates": [candidate | ({"finishReason": end} if end else {})], "modelVersion": "gemini-tests",
                **({"usageMetadata": self._USAGE} if end else {})}  # fmt: skip

    def refusal(self, fault: Fault) -> JSON:
        return {"error": {"code": fault.status, "message": fault.message, "status": "REFUSED"}}


class VertexVendor(GeminiVendor):
    """Google's Vertex AI, and the service that gives a token for what a service account has signed."""

    TOKEN: Final = "token-of-the-service-account"

    def is_stream(self, path: str, body: JSON) -> bool:
        return path != "/token" and super().is_stream(path, body)

    def whole(self, path: str, body: JSON) -> JSON:
        if path == "/token":
            return {"access_token": self.TOKEN, "expires_in": 3600, "token_type": "Bearer"}
        return super().whole(path, body)

    def account(self) -> str:
        """Returns the file of a service account."""
        private = rsa.generate_private_key(65537, 2048)
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        names = {
            "type": "service_account",
            "project_id": "tests",
            "client_email": "tests@example.com",
            "private_key_id": "1",
        }
        return json.dumps({**names, "private_key": pem, "token_uri": f"{self.url}/token"}, indent=2)


class CohereVendor(NativeVendor):
    """Cohere's `/v2/chat` and `/v2/embed`. Source: docs.cohere.com/v2/reference.

    Events are lines of JSON unless the client accepts `text/event-stream`, as LiteLLM does not.
    """

    CONTENT_TYPE = "application/stream+json"

    _USAGE: Final = {
        "billed_units": {"input_tokens": PROMPT_TOKENS, "output_tokens": TOKENS},
        "tokens": {"input_tokens": PROMPT_TOKENS, "output_tokens": TOKENS},
    }
    _CALL: Final = {
        "id": "add_1", "type": "function", "function": {"name": "add", "arguments": json.dumps(ADDENDS)}
    }  # fmt: skip

    def is_stream(self, path: str, body: JSON) -> bool:
        return bool(body.get("stream"))

    def whole(self, path: str, body: JSON) -> JSON:
        if path == "/v2/embed":
            vectors = [EMBEDDING for _ in body["texts"]]
            return {
                "id": "1",
                "embeddings": {"float": vectors},
                "texts": body["texts"],
                "meta": {"billed_units": {"input_tokens": 4}},
            }
        if self._calls(body):
            message: JSON = {"role": "assistant", "tool_plan": "I add.", "tool_calls": [self._CALL]}
            return {"id": "1", "finish_reason": "TOOL_CALL", "message": message, "usage": self._USAGE}
        message = {"role": "assistant", "content": [{"type": "text", "text": self.text}]}
        return {"id": "1", "finish_reason": "COMPLETE", "message": message, "usage": self._USAGE}

    def events(self, body: JSON) -> Iterator[bytes]:
        yield self._event("message-start", id="1", delta={"message": {"role": "assistant", "content": []}})
        if self._calls(body):
            call = {**self._CALL, "function": {"name": "add", "arguments": ""}}
            yield self._event("tool-call-start", index=0, delta={"message": {"tool_calls": call}})
            arguments = {"function": {"arguments": json.dumps(ADDENDS)}}
            yield self._event("tool-call-delta", index=0, delta={"message": {"tool_calls": arguments}})
            yield self._event("tool-call-end", index=0)
        else:
            yield self._event("content-start", index=0, delta={"message": {"content": {"type": "text", "text": ""}}})
            for piece in PIECES:
                yield self._event("content-delta", index=0, delta={"message": {"content": {"text": piece}}})
            yield self._event("content-end", index=0)
        reason = "TOOL_CALL" if self._calls(body) else "COMPLETE"
        yield self._event("message-end", delta={"finish_reason": reason, "usage": self._USAGE})

    def _calls(self, body: JSON) -> bool:
        return bool(body.get("tools")) and not any(turn["role"] == "tool" for turn in body["messages"])

    def _event(self, name: str, **fields: Any) -> bytes:
        return json.dumps({"type": name, **fields}).encode() + b"\n"


class BedrockVendor(NativeVendor):
    """Amazon's `Converse` and `ConverseStream`. Source: docs.aws.amazon.com/bedrock, and the event stream encoding of Smithy."""

    CONTENT_TYPE = "application/vnd.amazon.eventstream"
    _USAGE: Final = {"inputTokens": PROMPT_TOKENS, "outputTokens": TOKENS, "totalTokens": PROMPT_TOKENS + TOKENS}

    def is_stream(self, path: str, body: JSON) -> bool:
        return path.endswith("/converse-stream")

    def whole(self, path: str, body: JSON) -> JSON:
        calls = self._calls(body)
        use = {"toolUse": {"toolUseId": "add_1", "name": "add", "input": ADDENDS}}
        message = {"role": "assistant", "content": [use if calls else {"text": self.text}]}
        reason = "tool_use" if calls else "end_turn"
        return {"output": {"message": message}, "stopReason": reason, "usage": self._USAGE, "metrics": {"latencyMs": 1}}

    def events(self, body: JSON) -> Iterator[bytes]:
        yield self._event("messageStart", {"role": "assistant"})
        if self._calls(body):
            start = {"toolUse": {"toolUseId": "add_1", "name": "add"}}
            yield self._event("contentBlockStart", {"contentBlockIndex": 0, "start": start})
            deltas: list[JSON] = [{"toolUse": {"input": json.dumps(ADDENDS)}}]
        else:
            deltas = [{"text": piece} for piece in PIECES]
        for delta in deltas:
            yield self._event("contentBlockDelta", {"contentBlockIndex": 0, "delta": delta})
        yield self._event("contentBlockStop", {"contentBlockIndex": 0})
        yield self._event("messageStop", {"stopReason": "tool_use" if self._calls(body) else "end_turn"})
        yield self._event("metadata", {"usage": self._USAGE, "metrics": {"latencyMs": 1}})

    def _calls(self, body: JSON) -> bool:
        answered = any("toolResult" in part for turn in body["messages"] for part in turn["content"])
        return bool(body.get("toolConfig")) and not answered

    def _event(self, name: str, payload: JSON) -> bytes:
        """Returns a message: lengths, their checksum, headers, payload, and the checksum of all."""
        named = {":message-type": "event", ":event-type": name, ":content-type": "application/json"}
        headers = b"".join(
            bytes([len(key)]) + key.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
            for key, value in named.items()
        )
        body = json.dumps(payload).encode()
        prelude = struct.pack(">II", 16 + len(headers) + len(body), len(headers))
        message = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + body
        return message + struct.pack(">I", zlib.crc32(message))
