"""Fulmen's additions to a vLLM server, loaded with `--middleware fulmen_vllm.FulmenMiddleware` and
`--worker-extension-cls fulmen_vllm.FulmenWorker`.

They add four features to vLLM 0.32:

- Chat completions report the weight version of each token. vLLM reports it only at `/inference/v1/generate`.
- With `--enable-return-routed-experts` streams of chat completions carry the experts of their tokens, too, in the last
  event of each choice.
- Every path but health requires the API key, not only those below `/v1`. Otherwise any caller of `/collective_rpc`
  could load weights.
- Output layers tied to the embeddings get new weights. On a CPU they use a packed copy, which `reload_weights` does not
  update.

This module runs in vLLM's environment and imports only vLLM and the standard library. If vLLM's code is not as
expected, it logs a warning and adds no versions; the proxy then uses the time of promotion.
"""

import base64
import functools
import hashlib
import hmac
import io
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

logger = logging.getLogger("vllm.fulmen")

OPEN_PATHS = frozenset({"/health", "/ping"})
FINISHED = '"finish_reason":"'
EVENT = "data: "

Fields = dict[int, dict[str, Any]]
"""Fields added to each choice of an answer, by the choice's index."""
ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


class FulmenMiddleware:
    """Requires the key of `VLLM_API_KEY` on every path but health, and adds versions to answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        key = os.environ.get("VLLM_API_KEY", "")
        self._digest = hashlib.sha256(f"Bearer {key}".encode()).digest() if key else b""
        report_versions()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Forwards a request, or refuses it with status 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Any) -> bool:
        if not self._digest:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(hashlib.sha256(given).digest(), self._digest)


class FulmenWorker:
    """Methods added to vLLM's workers, called by `/collective_rpc`."""

    model_runner: Any

    def fulmen_reload(self, weights_path: str) -> None:
        """Loads the weights of a model folder, including tied layers."""
        self.model_runner.reload_weights(weights_path=weights_path)
        model = self.model_runner.get_model()
        for layer in model.modules():
            # Only layers with a packed copy of their weights have `cpu_linear`.
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)


def report_versions() -> None:
    """Adds to chat completions `weight_versions` in each choice: `[{"version": 3, "start": 0, "end": 17}]`."""
    try:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat as Chat

        whole, streamed = Chat.chat_completion_full_generator, Chat.chat_completion_stream_generator
    except (ImportError, AttributeError):
        logger.warning("This version of vLLM is not supported: its answers do not report the versions of their tokens.")
        return
    if hasattr(whole, "__wrapped__"):
        return

    @functools.wraps(whole)
    async def full(self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
        added: Fields = {}
        answer = await whole(self, request, _watched(result_generator, added), *args, **kwargs)
        for choice in getattr(answer, "choices", ()):
            for name, value in added.get(choice.index, {}).items():
                setattr(choice, name, value)
        return answer

    @functools.wraps(streamed)
    async def stream(self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        added: Fields = {}
        async for event in streamed(self, request, _watched(result_generator, added), *args, **kwargs):
            yield _with_fields(event, added) if added and FINISHED in event else event

    Chat.chat_completion_full_generator = full
    Chat.chat_completion_stream_generator = stream


async def _watched(results: AsyncIterator[Any], added: Fields) -> AsyncIterator[Any]:
    """Forwards results, and records the versions and experts of each ended choice."""
    async for result in results:
        for output in result.outputs:
            ranges = getattr(output, "weight_versions", None)
            # Labels that are not numbers are not Fulmen's, such as vLLM's `default`.
            if ranges and all(span.version.isascii() and span.version.isdigit() for span in ranges):
                added.setdefault(output.index, {})["weight_versions"] = [
                    {"version": int(span.version), "start": span.start, "end": span.end} for span in ranges
                ]
            experts = getattr(output, "routed_experts", None)
            if experts is not None:
                added.setdefault(output.index, {})["routed_experts"] = _written(experts)
        yield result


def _written(array: Any) -> str:
    """Writes an array as vLLM's own `numpy2base64` does."""
    import numpy as np

    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode("ascii")


def _with_fields(event: str, added: Fields) -> str:
    body = json.loads(event.removeprefix(EVENT))
    for choice in body.get("choices", ()):
        if choice.get("finish_reason"):
            choice.update(added.get(choice.get("index"), {}))
    return f"{EVENT}{json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n"
