"""The states of codecs on one rank, and how they were before a round that may have to be taken back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.codecs.codec import Codec, State


@dataclass(slots=True, kw_only=True)
class CodecMemory:
    """A codec's state on this rank.

    Attributes:
        codec: The codec this state belongs to.
        states: State by bucket.
        dirty: Buckets whose residual may be nonzero.
        shard: This rank's shard of the sums; None if it has none.
    """

    codec: Codec
    states: dict[int, State] = field(default_factory=dict)
    dirty: set[int] = field(default_factory=set)
    shard: Shard | None = None

    def holders(self) -> list[dict[int, State]]:
        """Returns where states are, by bucket: the rank's, and its shard's."""
        return [self.states] if self.shard is None else [self.states, self.shard.states]


class Before:
    """Copies of the states of the buckets of one round, from before it; their memory is used again by the next."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[int, State], int, State | None]] = []
        self._dirty: list[tuple[CodecMemory, int, bool]] = []
        self._room: dict[tuple[int, int], State] = {}

    def keep(self, bucket: int, memories: Iterable[CodecMemory]) -> None:
        """Copies what a bucket has in some memories."""
        for memory in memories:
            self._dirty.append((memory, bucket, bucket in memory.dirty))
            for holder in memory.holders():
                self._kept.append((holder, bucket, self._copied(holder, bucket)))

    def _copied(self, holder: dict[int, State], bucket: int) -> State | None:
        state = holder.get(bucket)
        if state is None:
            return None
        room = self._room.setdefault((id(holder), bucket), {})
        for name in room.keys() - state.keys():
            del room[name]
        for name, tensor in state.items():
            if name in room and room[name].shape == tensor.shape:
                room[name].copy_(tensor)
            else:
                room[name] = tensor.clone()
        return room

    def undo(self) -> None:
        """Writes all copies back; states that did not exist are removed again."""
        for holder, bucket, kept in self._kept:
            if kept is None:
                holder.pop(bucket, None)
            else:
                state = holder[bucket]
                state.clear()
                state.update({name: tensor.clone() for name, tensor in kept.items()})
        for memory, bucket, was_dirty in self._dirty:
            (memory.dirty.add if was_dirty else memory.dirty.discard)(bucket)
        self.forget()

    def forget(self) -> None:
        """Gives up what was kept: the round counts."""
        self._kept.clear()
        self._dirty.clear()

    def clear(self) -> None:
        """Frees the memory of the copies, too."""
        self.forget()
        self._room.clear()
