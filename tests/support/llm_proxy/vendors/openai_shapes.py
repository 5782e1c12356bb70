"""Shapes of the OpenAI API, taken from the vendor's own typed package.

Requests are checked against the package's parameter types, answers are made of its models: what the
fake vendor takes and gives is what the package says, as far as types say it.
"""

from __future__ import annotations

from typing import Any

from openai.types.chat.completion_create_params import CompletionCreateParams as ChatParams
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatStreamingParams
from openai.types.completion_create_params import CompletionCreateParams as TextParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextStreamingParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParams, ResponseCreateParamsStreaming
from pydantic import TypeAdapter
from pydantic_core import SchemaValidator, ValidationError

JSON = dict[str, Any]


def _eager(schema: Any) -> Any:
    """Turns iterables of a schema into lists, which are checked at once instead of when they are read."""
    match schema:
        case {"type": "generator", **rest}:
            return {"type": "list", "items_schema": _eager(rest["items_schema"])}
        case dict():
            return {key: _eager(value) for key, value in schema.items()}
        case list():
            return [_eager(value) for value in schema]
        case tuple():
            return tuple(_eager(value) for value in schema)
        case _:
            return schema


class RequestShape:
    """Checks the requests of one API."""

    def __init__(self, params: Any, names: Any) -> None:
        self._validator = SchemaValidator(_eager(TypeAdapter(params).core_schema))
        self._names: frozenset[str] = names.__required_keys__ | names.__optional_keys__

    def fault(self, body: JSON, *, also: frozenset[str]) -> str | None:
        """Returns what is wrong with a request; None if nothing is. Fields beside the API's own must be in `also`."""
        unknown = sorted(body.keys() - self._names - also)
        if unknown:
            return f"Unrecognized request argument supplied: {', '.join(unknown)}"
        try:
            self._validator.validate_python(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return f"Invalid value at {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        return None


CHAT = RequestShape(ChatParams, ChatStreamingParams)
COMPLETIONS = RequestShape(TextParams, TextStreamingParams)
EMBEDDINGS = RequestShape(EmbeddingCreateParams, EmbeddingCreateParams)
RESPONSES = RequestShape(ResponseCreateParams, ResponseCreateParamsStreaming)

_STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def shaped(model: Any, document: JSON) -> JSON:
    """Returns a document of one of the vendor's models.

    Raises:
        ValidationError: if it is not one.
    """
    return model.model_validate(document).model_dump(mode="json", by_alias=True, exclude_unset=True)


def response_event(document: JSON) -> JSON:
    """Returns an event of a response's stream."""
    event = _STREAM_EVENT.validate_python(document)
    return event.model_dump(mode="json", by_alias=True, exclude_unset=True)
