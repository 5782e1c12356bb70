"""What a codec is: it makes payloads of gradients, and gradients of payloads.

A bucket is a flat piece of the gradients of one rank, a segment the part of a bucket that one shard sums. In a round
every rank encodes its bucket, one payload for each segment; the shard of a segment adds what the ranks have sent, in
the order of the ranks, encodes the sum in turn, and all ranks decode the very same bytes. Invariants: encoding and decoding
are functions of their arguments alone, on every machine; what is not sent stays in the state, so that the sum of all
that was decoded and of the state is the sum of all that was given, to float32's tolerance; a payload whose segment was
not accepted is given back by `credit`.

A codec's file uses methods of tensors and `exchange.kernels`, and imports no torch itself: the service reads its
settings, and never trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fulmen_exchange.settings import CodecSettings

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096
"""Elements; segments begin at multiples of it, so that payloads of blocks are never cut."""

State = dict[str, "Tensor"]
"""What a codec keeps of one bucket from round to round: float32 tensors by name, flat.

They are as long as the bucket, element for element, and those of two ranks may be added up; but for what a linear codec
has in `shared`.
"""

RESIDUAL = "residual"
"""What most codecs call the tensor of what was not sent."""


class PayloadInvalid(Exception):
    """A payload is not what its codec makes; the text says why, and names no value of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What all ranks know of a round before it begins; the same for each.

    Attributes:
        number: From 1; rounds that were repeated count once.
        world_size: Ranks that take part.
        ratio: Bytes of float32 for each byte that is to be sent, where the codec has a choice.
        rank: Which of the ranks this one is, from 0; a shard that sums has a number beyond all ranks.
        seed: Of what is random.
        flush: Whether all that was kept back is to be sent, as exactly as the codec can.
        bucket: Which one is encoded; what is random differs between buckets.
    """

    number: int
    world_size: int = 1
    ratio: float = 1.0
    rank: int = 0
    seed: int = 0
    flush: bool = False
    bucket: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One encoded segment.

    Attributes:
        codec: Registered name of the codec that reads it.
        version: Version of its format.
        size: Elements of the segment.
        parts: Its tensors, contiguous and one-dimensional; which is which, the codec says.
    """

    codec: str
    version: int
    size: int
    parts: tuple[Tensor, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A flat piece of the gradients.

    Attributes:
        index: Which one, from 0.
        flat: float32, [n].
        matrices: Where each parameter lies: begin, rows and columns.
        offsets: Where segments begin, and the end: multiples of `BLOCK` but for the last; one more than there are segments.
    """

    index: int
    flat: Tensor
    matrices: Sequence[tuple[int, int, int]]
    offsets: Sequence[int]


class BaseCodec:
    """What all codecs have in common. They are stateless: what is remembered is in the `State` that they are given.

    Attributes:
        name: What settings name it by.
        version: Of the format of its payloads.
        kept: Name of the tensor of its state that has what was not sent; None if all of it always is.
    """

    name: str
    version: int
    kept: str | None = RESIDUAL

    def correct(self, state: State, gradient: Tensor, begin: int, out: Tensor) -> None:
        """Puts in `out` what the optimiser is to get of a gradient in a round that leaves this codec out.

        The gradient itself, unless the codec holds the optimiser's momentum; what was kept back is not added.

        Args:
            state: Of a bucket; changed in place.
            gradient: Of a part of it, [n].
            begin: Where that part begins.
            out: float32 [n]; may be the gradient.
        """
        out.copy_(gradient)

    def give_back(self, gradient: Tensor, state: State) -> None:
        """Adds to a gradient, in place, all that was kept back; nothing is any more."""
        if self.kept is not None:
            gradient.add_(state[self.kept])
            state[self.kept].zero_()


class SegmentCodec(BaseCodec, ABC):
    """Encodes segments that a shard can sum.

    Attributes:
        local_clip: Norm to which all of a rank's gradients together are scaled down, over the root of the number of ranks,
            before they are encoded; None where nothing is accumulated and the sum may be clipped as it is.
    """

    local_clip: float | None = None

    @abstractmethod
    def new_state(self, like: Tensor) -> State:
        """Makes the state of a bucket, on the device of `like`, which is as long."""

    @abstractmethod
    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """Encodes a bucket, one payload for each segment, and keeps in `state` what is not in them.

        Args:
            gradient: float32 [n], finite; may be overwritten.
            state: Changed in place.
            offsets: Where segments begin, and the end.
            round_: The round.
        """

    @abstractmethod
    def add(self, payload: Payload, out: Tensor) -> None:
        """Adds what a payload says to a segment, float32 [size], in place.

        Raises:
            PayloadInvalid: if it is not what this codec makes; nothing is added then.
        """

    @abstractmethod
    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Puts a payload back into the state of its bucket, whose segment begins there: nobody has summed it."""

    @abstractmethod
    def reply(self) -> SegmentCodec:
        """Returns the codec of the way back; its state is that of the shard."""


class LinearCodec(BaseCodec, ABC):
    """Makes tensors whose sums are those of the gradients, so that no shard has to decode what the ranks send.

    Attributes:
        shared: Names of tensors of its state that are the same on every rank, of any length.
    """

    shared: tuple[str, ...] = ()

    @abstractmethod
    def new_state(self, bucket: Bucket) -> State:
        """Makes the state of a bucket."""

    @abstractmethod
    def reduce(self, bucket: Bucket, state: State, all_reduce: Callable[[Tensor], None], round_: Round) -> None:
        """Replaces a bucket by the sum over the ranks, the same bits on each.

        Args:
            bucket: Its `flat` is changed in place.
            state: Changed in place.
            all_reduce: Sums a tensor over the ranks, in place; all ranks call it with the same shapes in the same order.
            round_: The round.
        """


Codec = SegmentCodec | LinearCodec
Made = TypeVar("Made", bound=CodecSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecEntry(Generic[Made]):
    """A codec as the registry knows it.

    Attributes:
        settings: Its settings class, whose `codec` is its name.
        make: Builds it from its settings.
    """

    settings: type[Made]
    make: Callable[[Made], Codec]

    @property
    def name(self) -> str:
        """What settings name it by."""
        return str(self.settings.model_fields["codec"].default)


AnyEntry = CodecEntry[Any]
