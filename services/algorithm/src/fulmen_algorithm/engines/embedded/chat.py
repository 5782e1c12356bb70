"""Answers in OpenAI's format: complete, or in chunks while tokens are sampled.

Invariant: token ids, log-probabilities and `usage.completion_tokens` of an answer count the same tokens, including
the sampled end-of-turn token; `weight_versions` covers exactly these tokens.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from fulmen_algorithm.engines.embedded.protocol import ChatRequest, InvalidRequest
from fulmen_algorithm.engines.embedded.routing import answer_experts
from fulmen_algorithm.engines.embedded.sampling import SampledToken
from fulmen_algorithm.engines.embedded.text import TextStream, ToolCall, parse_tool_calls
from fulmen_algorithm.engines.embedded.token_text import token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRenderer:
    """Turns messages into prompt tokens by the tokenizer's chat template.

    Attributes:
        tokenizer: Has a chat template.
        max_model_tokens: Maximum length of prompt plus completion, in tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    max_model_tokens: int

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """Renders the prompt.

        Raises:
            InvalidRequest: if the template rejects the messages, or the prompt fills the context.
        """
        # Imported late: only the template depends on jinja2.
        from jinja2 import TemplateError

        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                [self._message(m) for m in request.messages],
                tools=[dict(t) for t in request.tools] or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )  # type: ignore[assignment]  # one conversation, tokenised, gives a list of ids
        except (TemplateError, KeyError, TypeError) as error:
            raise InvalidRequest(f"The chat template refused the messages: {error}", param="messages") from error
        if not ids:
            raise InvalidRequest("The chat template rendered an empty prompt.", param="messages")
        wanted = request.sampling.max_tokens if request.max_tokens_given else 1
        if len(ids) + wanted > self.max_model_tokens:
            raise InvalidRequest(
                f"The model accepts {self.max_model_tokens} tokens; the prompt has {len(ids)} and {wanted} more were "
                "requested.",
                param="messages",
                code="context_length_exceeded",
            )
        return ids

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Prepares a message; arguments become objects, since some templates do not accept text."""
        template = self.tokenizer.chat_template
        if not message.get("tool_calls") or (isinstance(template, str) and "arguments is string" in template):
            return dict(message)
        calls = []
        for call in message["tool_calls"]:
            try:
                arguments = msgspec.json.decode(call["function"]["arguments"])
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"Tool-call arguments are not JSON: {error}", param="messages") from error
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        return {**message, "tool_calls": calls}


@dataclass(slots=True, kw_only=True)
class Completion:
    """One answer while it is generated. `push` runs in the model thread, everything else on the event loop."""

    request: ChatRequest
    prompt_ids: list[int]
    max_tokens: int
    eos_token_ids: frozenset[int]
    text: TextStream
    tokenizer: PreTrainedTokenizerBase
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None

    def push(self, token: SampledToken) -> bool:
        """Adds a token; true if it ends the completion."""
        self.tokens.append(token)
        if token.token_id in self.eos_token_ids or self.text.push(token.token_id):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def answer(self) -> dict[str, Any]:
        """Renders the whole answer of a finished completion."""
        content, calls = self._split_text()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_tool_call(call) for call in calls]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": self._reason(calls),
            "logprobs": self._logprobs(self.tokens),
        }
        body = {**self._envelope("chat.completion"), "choices": [choice], "usage": self._usage()}
        if self.request.return_token_ids:
            body["prompt_token_ids"] = self.prompt_ids
            choice["token_ids"] = [t.token_id for t in self.tokens]
            self._add_experts(choice)
        body["weight_versions"] = weight_versions(self.tokens)
        return body

    def first_chunk(self) -> dict[str, Any]:
        """Renders the chunk that opens a stream: the role, and the prompt's token ids."""
        body = self._chunk({"role": "assistant", "content": ""}, [], None)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = self.prompt_ids
        return body

    def chunk(self, tokens: Sequence[SampledToken], piece: str) -> dict[str, Any]:
        """Renders a chunk of tokens and the text that became final with them."""
        return self._chunk({"content": piece} if piece else {}, tokens, None)

    def last_chunk(self) -> dict[str, Any]:
        """Renders the chunk that ends a stream: rest of the text, tool calls, finish reason, weight versions."""
        _, calls = self._split_text()
        delta: dict[str, Any] = {}
        if piece := self.text.drain(final=True):
            delta["content"] = piece
        if calls:
            delta["tool_calls"] = [{"index": i, **_tool_call(call)} for i, call in enumerate(calls)]
        body = self._chunk(delta, [], self._reason(calls))
        if self.request.return_token_ids:
            self._add_experts(body["choices"][0])
        body["weight_versions"] = weight_versions(self.tokens)
        return body

    def _add_experts(self, choice: dict[str, Any]) -> None:
        """Adds the experts of prompt and completion, without the last token, which no pass computed."""
        if experts := answer_experts([token.experts for token in self.tokens]):
            choice["routed_experts"] = experts

    def usage_chunk(self) -> dict[str, Any]:
        """Renders the chunk with the usage."""
        return {**self._envelope("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _split_text(self) -> tuple[str, list[ToolCall]]:
        return parse_tool_calls(self.text.text) if self.request.tools else (self.text.text, [])

    def _reason(self, calls: Sequence[ToolCall]) -> str | None:
        return "tool_calls" if calls and self.finish_reason == "stop" else self.finish_reason

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _chunk(
        self, delta: dict[str, Any], tokens: Sequence[SampledToken], finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": self._logprobs(tokens) if tokens else None,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = [t.token_id for t in tokens]
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        texts = token_bytes(self.tokenizer, [t.token_id for t in tokens])
        return {
            "content": [
                {
                    "token": text.decode(errors="replace"),
                    "logprob": token.logprob,
                    "bytes": list(text),
                    "top_logprobs": [],
                }
                for text, token in zip(texts, tokens, strict=True)
            ],
            "refusal": None,
        }

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt_ids), len(self.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def weight_versions(tokens: Sequence[SampledToken]) -> list[dict[str, int]]:
    """Groups tokens into ranges [start, end) sampled from one version of the weights."""
    ranges: list[dict[str, int]] = []
    for index, token in enumerate(tokens):
        if ranges and ranges[-1]["version"] == token.version:
            ranges[-1]["end"] = index + 1
        else:
            ranges.append({"version": token.version, "start": index, "end": index + 1})
    return ranges


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
