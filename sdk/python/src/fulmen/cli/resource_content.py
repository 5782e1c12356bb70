"""Names and contents of resources as people write and read them."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError, Message

from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.store.v1 import resource_pb2

__all__ = ["content_text", "resource_name", "shown_content"]

# Kinds whose content is a message of the contract.
_MESSAGES: Final[dict[str, type[Message]]] = {
    "agent": agent_spec_pb2.AgentSpec,
    "route": route_pb2.Route,
    "backend": backend_pb2.Backend,
}


def resource_name(given: str) -> str:
    """Completes a bare id, or an id with a version or alias, to a name."""
    return given if given.startswith("resources/") else f"resources/{given}"


def content_text(version: resource_pb2.ResourceVersion) -> str | None:
    """Returns the content as text, decoded if it is a message of the contract; None if it is no text."""
    message_class = _MESSAGES.get(version.kind)
    try:
        if message_class is not None:
            return str(message_class.FromString(version.content)).rstrip()
        return version.content.decode("utf-8").rstrip()
    except (DecodeError, UnicodeDecodeError):
        return None


def shown_content(version: resource_pb2.ResourceVersion) -> str:
    """Returns the content for a person, or what it is instead."""
    text = content_text(version)
    if text is not None:
        return text
    message_class = _MESSAGES.get(version.kind)
    if message_class is not None:
        return f"({version.size_bytes} bytes that are no {message_class.DESCRIPTOR.full_name})"
    return f"({version.size_bytes} bytes, not text; --raw writes them)"
