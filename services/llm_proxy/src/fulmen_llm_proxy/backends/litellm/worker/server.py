"""Answers the proxy's calls in the form of OpenAI's API."""

import base64
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import litellm
from aiohttp import web

from fulmen_llm_proxy.backends.litellm.worker.arguments import CHAT, EMBED, Kind, Vendor, arguments_of
from fulmen_llm_proxy.backends.litellm.worker.egress import CURRENT, Call
from fulmen_llm_proxy.backends.litellm.worker.failures import CallFailed, document_of, failure_of

__all__ = ["Server"]

GATEWAY_HEADER: Final = "X-Fulmen-Gateway"
KEY_HEADER: Final = "X-Fulmen-Key"
OPTIONS_HEADER: Final = "X-Fulmen-Options"

_FIELDS: Final = ("id", "object", "created", "model", "choices", "data", "usage", "system_fingerprint")


class Server:
    """The paths that are served, to who knows the secret."""

    def __init__(self, vendor: Vendor, secret: str) -> None:
        self._vendor = vendor
        self._secret = secret

    def app(self, max_request_bytes: int) -> web.Application:
        """Returns the application."""
        app = web.Application(client_max_size=max_request_bytes)
        app.add_routes([web.post("/v1/chat/completions", self._chat), web.post("/v1/embeddings", self._embed)])
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CHAT, litellm.acompletion)

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, EMBED, litellm.aembedding)

    async def _answer(self, request: web.Request, kind: Kind, ask: Callable[..., Awaitable[Any]]) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get(GATEWAY_HEADER, "").encode(), self._secret.encode()):
            return web.Response(status=403)
        call = Call(key=_decoded(request, KEY_HEADER).decode())
        CURRENT.set(call)
        try:
            body, options = document_of(await request.read()), document_of(_decoded(request, OPTIONS_HEADER))
            arguments = arguments_of(self._vendor, kind, body, key=call.key, options=options)
            answer = await ask(**arguments)
            if "stream" not in arguments:
                return web.json_response(_document(answer))
            events = aiter(answer)
            first = await anext(events, None)
            if first is None:
                raise CallFailed(502, "empty_stream", f"{self._vendor.provider} ended its stream before an event.")
        except Exception as error:  # noqa: BLE001  # the edge of this process
            return self._refused(error, call)
        return await self._stream(request, first, events, call)

    def _refused(self, error: Exception, call: Call) -> web.Response:
        failed = failure_of(error, call, self._vendor.provider)
        headers = {"Retry-After": call.retry_after} if call.retry_after else {}
        return web.json_response(failed.document(), status=failed.status, headers=headers)

    async def _stream(
        self, request: web.Request, first: Any, events: AsyncIterator[Any], call: Call
    ) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        try:
            await out.write(_event(first, first.id))
            async for each in events:
                await out.write(_event(each, first.id))
            await out.write(b"data: [DONE]\n\n")
        except ConnectionError:
            raise  # the proxy has left
        except Exception as error:  # noqa: BLE001  # the edge of this process
            document = failure_of(error, call, self._vendor.provider).document()
            await out.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        finally:
            with contextlib.suppress(Exception):
                await events.aclose()  # type: ignore[attr-defined]
        await out.write_eof()
        return out


def _decoded(request: web.Request, header: str) -> bytes:
    return base64.b64decode(request.headers.get(header, ""))


def _event(chunk: Any, answer_id: str) -> bytes:
    return b"data: " + json.dumps(_document(chunk) | {"id": answer_id}).encode() + b"\n\n"


def _document(answer: Any) -> dict[str, Any]:
    """Returns an answer as OpenAI's API has it: LiteLLM adds its own fields, most of them empty."""
    given: dict[str, Any] = answer.model_dump(mode="json", exclude_none=True)
    document: dict[str, Any] = {name: given[name] for name in _FIELDS if name in given}
    for choice in given.get("choices", ()):
        choice.pop("provider_specific_fields", None)
        if (message := choice.get("message")) is not None:
            choice["message"] = {"content": None} | {name: value for name, value in message.items() if value != []}
    document.get("usage", {}).pop("cost", None)
    return document
