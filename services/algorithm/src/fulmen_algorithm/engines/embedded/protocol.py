"""Parses OpenAI chat-completion requests into typed requests, or refuses them with a typed error.

Invariant: a known parameter that changes the answer is either applied or refused with 400. Unknown parameters are
ignored, as by other OpenAI-compatible servers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulmen_algorithm.training.settings import WeightsKind

DEFAULT_MAX_TOKENS = 256
MAX_STOP_STRINGS = 16


class EngineError(Exception):
    """Base class of errors that the engine returns with an error status, in OpenAI's error shape."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Carries the message, and the parameter that it is about."""
        super().__init__(message)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Returns OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequest(EngineError):
    """The request is invalid."""

    status = 400
    kind = "invalid_request_error"


class Unauthorized(EngineError):
    """The bearer token is missing or wrong."""

    status = 401
    kind = "authentication_error"


class ModelNotFound(EngineError):
    """No model of that name is served."""

    status = 404
    kind = "invalid_request_error"


class Overloaded(EngineError):
    """The queue is full, or the request waited for too long; the caller may retry later."""

    status = 503
    kind = "overloaded_error"


class WeightsRejected(EngineError):
    """The weights cannot be loaded into this model."""

    status = 422
    kind = "invalid_request_error"


class WeightsConflict(EngineError):
    """A delta does not apply to the engine's weights; the caller must send complete weights."""

    status = 409
    kind = "invalid_request_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a completion.

    Attributes:
        temperature: Temperature; 0 is greedy.
        top_p: Probability mass of the nucleus; 1 for the whole vocabulary.
        max_tokens: Maximum number of completion tokens.
        stop: Texts that end the completion; not part of the answer.
        seed: Seed; gives the same tokens in any batch, up to rounding of the logits. None for a random one.
    """

    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...]
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked chat-completion request.

    Attributes:
        model: Requested model name; repeated in the answer.
        messages: OpenAI messages with text content.
        tools: OpenAI tool definitions; empty if none, or if `tool_choice` is "none".
        sampling: Sampling parameters.
        max_tokens_given: Whether the request has `max_tokens`; the default is reduced to fit the context.
        stream: Whether tokens are sent as they are sampled.
        include_usage: Whether a stream ends with a usage chunk.
        logprobs: Whether the answer includes log-probabilities.
        return_token_ids: Whether the answer includes token ids and weight versions.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    max_tokens_given: bool
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """A request to load new weights.

    Attributes:
        version: Policy version of the weights.
        kind: Content of `path`: a model folder, or a folder with a delta; adapters have their own folders.
        path: A folder; not used for adapters.
        adapters: Folders of the adapters by name.
        sha256: Expected checksum of the new weights; empty for no check.
    """

    version: int
    kind: WeightsKind = WeightsKind.FULL
    path: Path = Path()
    adapters: Mapping[str, Path] = field(default_factory=dict)
    sha256: str = ""


def parse_weights_order(body: object) -> LoadOrder:
    """Checks the body of a swap.

    Raises:
        InvalidRequest: if a parameter is invalid.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be an object.")
    path, version, adapters = body.get("path", ""), body.get("version"), body.get("adapters", {})
    if body.get("kind", "full") not in list(WeightsKind):
        raise InvalidRequest(f"kind must be one of {', '.join(WeightsKind)}.", param="kind")
    kind = WeightsKind(body.get("kind", "full"))
    if not isinstance(path, str) or (not path and kind is not WeightsKind.LORA):
        raise InvalidRequest("path must be a directory.", param="path")
    if not isinstance(adapters, dict) or not all(isinstance(folder, str) for folder in adapters.values()):
        raise InvalidRequest("adapters must be directories by name.", param="adapters")
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise InvalidRequest("version must be a non-negative integer.", param="version")
    if not isinstance(body.get("sha256", ""), str):
        raise InvalidRequest("sha256 must be text.", param="sha256")
    folders = {str(name): Path(folder) for name, folder in adapters.items()}
    return LoadOrder(version=version, kind=kind, path=Path(path), adapters=folders, sha256=body.get("sha256", ""))


def parse_chat_request(body: object) -> ChatRequest:
    """Checks a decoded JSON body.

    Raises:
        InvalidRequest: if a parameter has the wrong type or range, or is not supported.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequest("The body must be a JSON object.")
    _refuse_unsupported(body)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("model must be a non-empty string.", param="model")
    max_tokens = _max_tokens(body)
    tool_choice = body.get("tool_choice")
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, Mapping):
        raise InvalidRequest("stream_options must be an object.", param="stream_options")
    return ChatRequest(
        model=model,
        messages=_messages(body.get("messages")),
        tools=() if tool_choice == "none" else _tools(body.get("tools")),
        sampling=Sampling(
            temperature=_number(body, "temperature", default=1.0, low=0.0, high=100.0),
            top_p=_top_p(body),
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            stop=_stop(body.get("stop")),
            seed=_integer(body, "seed"),
        ),
        max_tokens_given=max_tokens is not None,
        stream=_flag(body, "stream"),
        include_usage=_flag(stream_options, "include_usage"),
        logprobs=_flag(body, "logprobs"),
        return_token_ids=_flag(body, "return_token_ids"),
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise InvalidRequest("n must be 1: this engine returns one choice per request.", param="n")
    if body.get("top_logprobs"):
        raise InvalidRequest("top_logprobs is not supported.", param="top_logprobs")
    for name in ("frequency_penalty", "presence_penalty"):
        if body.get(name):
            raise InvalidRequest(f"{name} is not supported.", param=name)
    for name in ("logit_bias", "functions", "function_call", "audio", "prediction"):
        if body.get(name):
            raise InvalidRequest(f"{name} is not supported.", param=name)
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise InvalidRequest("response_format must be text.", param="response_format")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise InvalidRequest('tool_choice must be "auto" or "none".', param="tool_choice")


def _messages(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidRequest("messages must be a non-empty list.", param="messages")
    return tuple(_message(m, i) for i, m in enumerate(value))


def _message(value: object, index: int) -> Mapping[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role.", param=where)
    content = value.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) != len(content):
            raise InvalidRequest(f"{where}.content may contain only text parts.", param=where)
        content = "".join(strings)
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string, a list of text parts or null.", param=where)
    calls = value.get("tool_calls") or []
    if not isinstance(calls, Sequence) or not all(_is_tool_call(call) for call in calls):
        raise InvalidRequest(f"{where}.tool_calls must be a list of function calls.", param=where)
    return {**value, "content": content or ""}


def _is_tool_call(call: object) -> bool:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str)


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequest("tools must be a list.", param="tools")
    for tool in value:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest("Each tool must be a function with a name.", param="tools")
    return tuple(value)


def _stop(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
        raise InvalidRequest("stop must be a non-empty string or a list of them.", param="stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may have at most {MAX_STOP_STRINGS} strings.", param="stop")
    return tuple(stops)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _integer(body, name)
        if value is not None:
            if value < 1:
                raise InvalidRequest(f"{name} must be at least 1.", param=name)
            return value
    return None


def _top_p(body: Mapping[str, Any]) -> float:
    top_p = _number(body, "top_p", default=1.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise InvalidRequest("top_p must be greater than 0.", param="top_p")
    return top_p


def _number(body: Mapping[str, Any], name: str, *, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}.", param=name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidRequest(f"{name} must be an integer.", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false.", param=name)
    return bool(value)
