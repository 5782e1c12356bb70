"""What the fake OpenAI vendor's model says: the same to the same request, so that tests can foretell it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

JSON = dict[str, Any]

_PIECE_CHARACTERS = 4
LOGPROB = -0.25
"""Of every token; a token is a piece of four characters."""


@dataclass(kw_only=True)
class Turn:
    """One thing that the model says.

    Attributes:
        calls: names and JSON arguments of the functions that it calls.
    """

    text: str | None = None
    refusal: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str = "stop"

    @property
    def spoken(self) -> str:
        """All of its text."""
        return (self.text or "") + (self.refusal or "") + "".join(arguments for _, arguments in self.calls)


def pieces_of(text: str) -> list[str]:
    """Cuts a text into its tokens."""
    return [text[start : start + _PIECE_CHARACTERS] for start in range(0, len(text), _PIECE_CHARACTERS)]


def said_by(content: Any) -> tuple[str, int]:
    """Returns the text of a message's content, of either API, and how many images are in it."""
    if isinstance(content, str) or content is None:
        return content or "", 0
    text = " ".join(part.get("text", "") for part in content if "text" in part)
    return text, sum(part["type"] in ("image_url", "input_image") for part in content)


def turn_for(content: Any, *, tools: list[str], parallel: bool, schema: JSON | None, limit: int | None) -> Turn:
    """Returns what the model says to the last message.

    Args:
        tools: names of the functions that it may call; empty if it may call none.
        schema: of the JSON that it must answer with.
        limit: most tokens.
    """
    text, images = said_by(content)
    if tools:
        called = tools if parallel else tools[:1]
        return Turn(calls=[(name, json.dumps({"input": text})) for name in called], finish_reason="tool_calls")
    if text.startswith("refuse"):
        return Turn(refusal="I cannot help with that.")
    answer = f"You said: {text}" if schema is None else json.dumps(example_of(schema))
    if images:
        answer += f" and showed {images} images."
    if limit is not None and len(pieces_of(answer)) > limit:
        return Turn(text="".join(pieces_of(answer)[:limit]), finish_reason="length")
    return Turn(text=answer)


def example_of(schema: JSON) -> Any:
    """Returns a value that a JSON schema allows, of the few kinds that tests use."""
    match schema.get("type"):
        case "object":
            return {name: example_of(inner) for name, inner in schema.get("properties", {}).items()}
        case "array":
            return [example_of(schema["items"])]
        case "integer" | "number":
            return 7
        case "boolean":
            return True
        case _:
            return schema.get("enum", ["seven"])[0]
