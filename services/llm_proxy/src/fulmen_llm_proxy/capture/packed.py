"""Packed calls of one attempt: the unit that is sent to the store and kept on disk.

Invariant: a chunk's id is chosen once, when the calls are packed. After a broken connection or a restart the chunk is
sent again under the same id, and the store drops duplicates.
"""

from __future__ import annotations

import msgspec

MAX_BATCH_BYTES = 2 * 1024 * 1024 - 256 * 1024
"""Maximum size of a batch that is packed or read from disk; leaves room for headers below the store's 2 MiB."""


class PackedCalls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A chunk, and its counts for the attempt's ledger.

    Attributes:
        attempt: `projects/{p}/rollouts/{r}/attempts/{n}`.
        chunk: serialised `fulmen.store.v1.SpanChunk`.
        calls: number of calls that end in it; 0 if its only call continues in the next chunk.
        unusable: number of calls that may not be trained on.
        captured: number of calls answered by a trained policy.
        trainable: whether training needs it; other chunks are dropped first when space runs out.
    """

    attempt: str
    chunk_id: str
    chunk: bytes
    calls: int
    unusable: int
    captured: int
    prompt_tokens: int
    completion_tokens: int
    trainable: bool


class Loss(msgspec.Struct, frozen=True):
    """Recorded calls that will not reach the store; `attempt` is empty if unknown."""

    attempt: str
    calls: int
    reason: str


class SpoolFull(Exception):
    """The spool is full, and nothing in it may be dropped."""
