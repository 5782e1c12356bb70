"""Messages between the runner and a child process.

A message is a JSON document and a binary body, each prefixed with its length. JSON rather than pickle, because an agent
controls what its child sends and must not be able to run code in the runner.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Maximum size of a child's message."""

_LENGTHS = struct.Struct(">II")

Document = dict[str, Any]


class MessageTooLarge(Exception):
    """A message is larger than `MAX_MESSAGE_BYTES`."""


def encode(document: Mapping[str, object], body: bytes = b"") -> bytes:
    """Encodes a message.

    Raises:
        TypeError, ValueError, RecursionError: If the document is not representable in JSON.
    """
    head = json.dumps(document).encode()
    return _LENGTHS.pack(len(head), len(body)) + head + body


async def receive(reader: asyncio.StreamReader) -> tuple[Document, bytes]:
    """Reads a message.

    Raises:
        IncompleteReadError: If the peer closed the connection.
        MessageTooLarge: If the message exceeds `MAX_MESSAGE_BYTES`.
        ValueError: If the message is malformed.
    """
    head_length, body_length = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if head_length + body_length > MAX_MESSAGE_BYTES:
        raise MessageTooLarge
    try:
        head = json.loads(await reader.readexactly(head_length))
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(head, dict):
        raise ValueError("a message is a JSON object")
    return head, await reader.readexactly(body_length)


def receive_blocking(connection: socket.socket) -> tuple[Document, bytes] | None:
    """Reads a message in a child; None if the runner has closed the connection."""
    lengths = _exactly(connection, _LENGTHS.size)
    if lengths is None:
        return None
    head_length, body_length = _LENGTHS.unpack(lengths)
    head, body = _exactly(connection, head_length), _exactly(connection, body_length)
    return None if head is None or body is None else (json.loads(head), body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
