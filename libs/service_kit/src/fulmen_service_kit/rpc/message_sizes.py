"""How much fits into a message.

No message is larger than a gRPC client without options accepts, 4 MiB, whatever is stored: lists and streams are filled to
less, and the limits of fields keep a single entry below the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

__all__ = [
    "ANSWER_BYTES",
    "MAX_SENT_BYTES",
    "MESSAGE_BYTES",
    "fitting",
    "messages_of",
    "messages_of_stream",
    "parts_of",
]

MAX_SENT_BYTES: Final = 4 * 1024 * 1024
"""What a gRPC client accepts without options; servers send nothing larger."""
MESSAGE_BYTES: Final = 1024 * 1024
"""What messages of streams are filled to."""
ANSWER_BYTES: Final = 3 * 1024 * 1024
"""What answers are filled to."""


Entry = TypeVar("Entry", bound=Message)
Item = TypeVar("Item")


def fitting(messages: Iterable[Entry], *, max_bytes: int = ANSWER_BYTES) -> list[Entry]:
    """Returns the first of these messages that fit into an answer, at least one; takes one more than these."""
    kept: list[Entry] = []
    size_bytes = 0
    for message in messages:
        size_bytes += message.ByteSize()
        if kept and size_bytes > max_bytes:
            break
        kept.append(message)
    return kept


def messages_of(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yields the entries of each message of a stream."""
    part: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        entry_bytes = entry.ByteSize()
        if part and size_bytes + entry_bytes > MESSAGE_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(entry)
        size_bytes += entry_bytes
    if part:
        yield part


async def messages_of_stream(
    entries: AsyncIterator[Entry], *, first_bytes: int = MESSAGE_BYTES
) -> AsyncIterator[list[Entry]]:
    """Yields the entries of each message of a stream, as they come.

    Args:
        entries: The entries.
        first_bytes: Size of the first message; each further one is twice as large, up to `MESSAGE_BYTES`. Small where
            someone looks at what comes first.
    """
    part: list[Entry] = []
    size_bytes, limit_bytes = 0, first_bytes
    async for entry in entries:
        entry_bytes = entry.ByteSize()
        if part and size_bytes + entry_bytes > limit_bytes:
            yield part
            part, size_bytes = [], 0
            limit_bytes = min(2 * limit_bytes, MESSAGE_BYTES)
        part.append(entry)
        size_bytes += entry_bytes
    if part:
        yield part


def parts_of(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yields parts of at most `size` items, in order."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
