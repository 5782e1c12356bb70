"""Completions of the byte-model server: prompts of text or of token ids, several at once, as vLLM words them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

JSON = dict[str, Any]


class TextCompletions:
    """What one completions request is answered with: each prompt's bytes in reverse."""

    def __init__(self, request: JSON, *, model: str, logprob_of: Callable[[int, int], float]) -> None:
        self._request = request
        self._logprob_of = logprob_of
        self._head = {"id": "cmpl-1", "object": "text_completion", "created": 1_700_000_000, "model": model}
        self._prompts = prompts_of(request["prompt"])
        self._choices = [prompt for prompt in self._prompts for _ in range(request.get("n") or 1)]

    def whole(self) -> JSON:
        """Returns the whole answer."""
        choices = []
        for index, prompt in enumerate(self._choices):
            ids = completion_ids(prompt, self._request)
            choices.append(self._choice(index, ids, start=0, prompt=prompt) | {"finish_reason": "stop"})
        return {**self._head, "choices": choices, "usage": self._usage()}

    def events(self) -> Iterator[JSON]:
        """Yields the events of the stream: the choices take turns, a token at a time."""
        remaining = {i: completion_ids(prompt, self._request) for i, prompt in enumerate(self._choices)}
        position = 0
        while remaining:
            for index, ids in list(remaining.items()):
                prompt = self._choices[index] if position == 0 else None
                choice = self._choice(index, ids[position : position + 1], start=position, prompt=prompt)
                if position == len(ids) - 1:
                    choice["finish_reason"] = "stop"
                    del remaining[index]
                yield {**self._head, "choices": [choice], "usage": None}
            position += 1
        if (self._request.get("stream_options") or {}).get("include_usage"):
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _choice(self, index: int, ids: list[int], *, start: int, prompt: list[int] | None) -> JSON:
        choice: JSON = {
            "index": index,
            "text": bytes(ids).decode("latin-1"),
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
        if self._request.get("logprobs") is not None:
            values = [self._logprob_of(token, start + offset) for offset, token in enumerate(ids)]
            choice["logprobs"] = {
                "tokens": [chr(token) for token in ids],
                "token_logprobs": values,
                "top_logprobs": [{} for _ in ids],
                "text_offset": list(range(start, start + len(ids))),
            }
        if self._request.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        return choice

    def _usage(self) -> JSON:
        prompt = sum(len(ids) for ids in self._prompts)
        generated = sum(len(completion_ids(ids, self._request)) for ids in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def prompts_of(prompt: Any) -> list[list[int]]:
    """Returns the token ids of each prompt of a request."""
    match prompt:
        case str():
            return [list(prompt.encode())]
        case [int(), *_]:
            return [prompt]
        case _:
            return [list(each.encode()) if isinstance(each, str) else each for each in prompt]


def completion_ids(prompt: list[int], request: JSON) -> list[int]:
    """Returns the token ids of the completion of a prompt."""
    return prompt[::-1][: request.get("max_tokens") or 16]
