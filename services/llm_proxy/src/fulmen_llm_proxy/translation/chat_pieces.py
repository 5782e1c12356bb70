"""The parts of chat completions that translators read: complete messages, or pieces of a stream."""

from __future__ import annotations

from typing import Any

import msgspec


class FunctionPiece(msgspec.Struct):
    """The function of a tool call, or a piece of it."""

    name: str | None = None
    arguments: str | None = None


class ToolPiece(msgspec.Struct):
    """A tool call, or a piece of one, identified by its index."""

    index: int | None = None
    id: str | None = None
    function: FunctionPiece | None = None


class Delta(msgspec.Struct):
    """A message, or a piece of one. Engines use either of two fields for reasoning."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolPiece] | None = None
    annotations: list[dict[str, Any]] | None = None  # Any: the backend's own format


class ChoiceLogprobs(msgspec.Struct):
    """Log-probabilities of a choice's text, one entry per token."""

    content: list[msgspec.Raw] | None = None


class ChoicePiece(msgspec.Struct):
    """A choice of an answer, or a piece of it."""

    index: int = 0
    message: Delta | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts of a chat completion."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    def as_responses(self) -> dict[str, object]:
        """Returns the counts in the format of the Responses API."""
        prompt, completion = self.prompt_tokens_details, self.completion_tokens_details
        total = self.prompt_tokens + self.completion_tokens if self.total_tokens is None else self.total_tokens
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": (prompt and prompt.cached_tokens) or 0,
                "cache_write_tokens": (prompt and prompt.cache_write_tokens) or 0,
            },
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": (completion and completion.reasoning_tokens) or 0},
            "total_tokens": total,
        }


class Fault(msgspec.Struct):
    """An error within a stream."""

    message: str | None = None
    code: str | int | None = None
    type: str | None = None


class Answer(msgspec.Struct):
    """A chat completion, or one event of its stream."""

    id: str = ""
    created: float = 0
    model: str = ""
    choices: list[ChoicePiece] = []
    usage: Usage | None = None
    service_tier: str | None = None
    error: Fault | str | None = None


decode_answer = msgspec.json.Decoder(Answer).decode
