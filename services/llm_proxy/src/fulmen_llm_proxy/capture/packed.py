"""Calls of one attempt, packed as the store takes them: what is sent, and what waits on disk.

Invariant: the chunk's id is chosen once, when the calls are packed. Whatever is sent again, after a
broken connection or a restart, has the same id, and the store drops repeats.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

MAX_BATCH_BYTES = 2 * 1024 * 1024 - 256 * 1024
"""Most bytes of calls that are packed, or read back from disk, at once: room for outlines below the store's 2 MiB."""


class PackedCalls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chunk and what its attempt's account should know of it.

    Attributes:
        attempt: `rollouts/{rollout}/attempts/{n}`.
        chunk: serialised `fulmen.store.v1.SpanChunk`.
        calls: how many calls it ends; 0 if it only begins one that goes on in the next chunk.
        unusable: how many of them may not be trained on.
        captured: how many of them are answers of a trained policy.
        trainable: it holds what training needs; one that does not is the first to go when room runs out.
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
    """Calls that were recorded and will not reach the store; `attempt` is empty if it cannot be told."""

    attempt: str
    calls: int
    reason: str


class SpoolFull(Exception):
    """The spool has no room, and nothing left that may be dropped."""


class Spool(Protocol):
    """A bounded, ordered place on disk. Its methods block: they run in one thread, one at a time.

    All of them but `take_losses` raise OSError if the disk fails; what is on disk stays as it was.
    """

    @property
    def is_empty(self) -> bool:
        """True if everything in it was acknowledged or lost."""
        ...

    @property
    def is_dirty(self) -> bool:
        """True if something was written since the last `sync`."""
        ...

    def append(self, packed: list[PackedCalls]) -> None:
        """Writes behind what is there, and takes what it has written out of the list.

        Raises:
            SpoolFull: if there is no room for the rest of the list.
        """
        ...

    def sync(self) -> None:
        """Makes what was written survive a loss of power."""
        ...

    def read(self) -> list[PackedCalls]:
        """Returns the oldest, in order; the same again until `acknowledge`. Empty if only damage is left."""
        ...

    def acknowledge(self) -> None:
        """Removes what was read last."""
        ...

    def give_up_head(self) -> None:
        """Leaves the oldest file aside, which cannot be read."""
        ...

    def take_losses(self) -> list[Loss]:
        """Returns what was lost since it was asked last."""
        ...
