"""Names and contents of resources in their readable form."""

from __future__ import annotations

from typing import Final

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError, Message

from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.store.v1 import resource_pb2

__all__ = ["ContentInvalid", "content_text", "packed_content", "resource_name", "shown_content"]

# Kinds whose content is a message of the contract.
_MESSAGES: Final[dict[str, type[Message]]] = {
    "agent": agent_spec_pb2.AgentSpec,
    "route": route_pb2.Route,
    "backend": backend_pb2.Backend,
}


class ContentInvalid(ValueError):
    """The content is invalid for its kind; the message has the reason."""


def resource_name(given: str) -> str:
    """Completes a bare id, or an id with a version or alias, to a name."""
    return given if given.startswith("resources/") else f"resources/{given}"


def packed_content(kind: str, content: bytes) -> tuple[bytes, str]:
    """Returns the stored form of a content, and its media type if the kind determines it.

    Kinds whose content is a message of the contract may be given as JSON, as text (what `resources show` prints) or as
    they are stored.

    Raises:
        ContentInvalid: if it is no such message.
    """
    message_class = _MESSAGES.get(kind)
    if message_class is None:
        return content, ""
    full_name = message_class.DESCRIPTOR.full_name
    media_type = f"application/x-protobuf; messageType={full_name}"
    text = content.decode(errors="replace")
    message = message_class()
    try:
        if not all(each.isprintable() or each.isspace() for each in text):
            message_class.FromString(content)
            return content, media_type
        if text.lstrip().startswith("{"):
            json_format.Parse(text, message)
        else:
            text_format.Parse(text, message)
    except (DecodeError, json_format.ParseError, text_format.ParseError) as error:
        raise ContentInvalid(f"This is not a {full_name}: {error}") from None
    return message.SerializeToString(deterministic=True), media_type


def content_text(version: resource_pb2.ResourceVersion) -> str | None:
    """Returns the content as text, decoding protobuf messages; None for binary content."""
    message_class = _MESSAGES.get(version.kind)
    try:
        if message_class is not None:
            return str(message_class.FromString(version.content)).rstrip()
        return version.content.decode("utf-8").rstrip()
    except (DecodeError, UnicodeDecodeError):
        return None


def shown_content(version: resource_pb2.ResourceVersion) -> str:
    """Returns the content as text, or a description of binary content."""
    text = content_text(version)
    if text is not None:
        return text
    message_class = _MESSAGES.get(version.kind)
    if message_class is not None:
        return f"({version.size_bytes} bytes that are not a {message_class.DESCRIPTOR.full_name})"
    return f"({version.size_bytes} bytes, not text; --raw writes them)"
