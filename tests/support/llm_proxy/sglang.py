"""A server that answers in the shape of SGLang, which needs a GPU and cannot run in tests.

What differs from vLLM, as SGLang's main branch of 2026 has it: the prompt's token ids stand within each choice; a
streamed chat completion that asks for token ids is refused; a whole answer tells the weights' version at its end; an
error is not wrapped.
"""

from __future__ import annotations

from aiohttp import web

from tests.support.llm_proxy.backend import JSON, Backend, Completion, Received

__all__ = ["NO_IDS_IN_STREAMS", "SglangBackend"]

NO_IDS_IN_STREAMS = (
    "return_token_ids is not supported with streaming on /v1/chat/completions. "
    "Please set stream=false when using return_token_ids=true."
)


class SglangBackend(Backend):
    """The server; its text, ids and log-probabilities are those of `Backend`."""

    weight_version = "default"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("stream") and body.get("return_token_ids"):
            self.received.append(Received(body=body, headers=dict(request.headers)))
            return web.json_response(
                {
                    "object": "error",
                    "message": NO_IDS_IN_STREAMS,
                    "type": "BadRequestError",
                    "param": None,
                    "code": 400,
                },
                status=400,
            )
        return await super()._chat(request)

    def _whole(self, completion: Completion) -> JSON:
        answer = super()._whole(completion)
        [choice] = answer["choices"]
        choice["matched_stop"] = None
        prompt_ids = answer.pop("prompt_token_ids", None)
        if prompt_ids is not None:
            choice["prompt_token_ids"] = prompt_ids
        answer["metadata"] = {"weight_version": self.weight_version}
        return answer
