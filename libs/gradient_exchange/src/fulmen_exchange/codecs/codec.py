"""The interface of codecs, which turn gradients into payloads and back.

A bucket is a flat part of one rank's gradients; a segment is the part of a bucket that one shard sums. In each round every
rank encodes its buckets, one payload per segment. The shard of a segment adds the payloads in the order of the ranks and
encodes the sum; all ranks decode the same bytes. Invariants: encoding and decoding depend on their arguments only, on
every machine; whatever is not sent stays in the state, so everything decoded plus the state equals everything encoded, to
float32's tolerance; a payload that was not accepted is returned to the state by `credit`.

A codec's module uses tensor methods and `fulmen_exchange.kernels` but does not import torch: its settings are also read
by services that never train.
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
"""Elements per block. Segments begin at multiples of it, so blocks are never split."""

State = dict[str, "Tensor"]
"""A codec's state of one bucket: flat float32 tensors by name.

Each is as long as the bucket, element for element, and those of two ranks may be added, except the `shared` tensors of a
linear codec.
"""

INT8, UINT8, INT16 = "torch.int8", "torch.uint8", "torch.int16"
BFLOAT16, FLOAT32 = "torch.bfloat16", "torch.float32"
RESIDUAL = "residual"
"""Name of the residual in the state of most codecs."""


class PayloadInvalid(Exception):
    """A payload is not one that its codec produces. The message contains none of its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What all ranks know of a round before it begins.

    Attributes:
        number: Number of the round, from 1; repeated rounds count once.
        world_size: Number of participating ranks.
        ratio: Bytes of float32 per byte to send, for codecs with a ratio.
        rank: This rank, from 0; a summing shard has a number beyond all ranks.
        seed: Seed of random numbers.
        flush: Whether to send the whole residual, as exactly as the codec can.
        bucket: Index of the encoded bucket; random numbers differ between buckets.
        ratio_factor: This rank's own ratio over the round's; 1 for a shard.
    """

    number: int
    world_size: int = 1
    ratio: float = 1.0
    rank: int = 0
    seed: int = 0
    flush: bool = False
    bucket: int = 0
    ratio_factor: float = 1.0

    @property
    def own_ratio(self) -> float:
        """Bytes of float32 per byte that this rank sends."""
        return self.ratio * self.ratio_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One encoded segment.

    Attributes:
        codec: Registered name of the codec.
        version: Version of the format.
        size: Elements of the segment.
        parts: Contiguous one-dimensional tensors; their meaning depends on the codec.
    """

    codec: str
    version: int
    size: int
    parts: tuple[Tensor, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts)


def check_frame(payload: Payload, *, name: str, version: int, size: int) -> None:
    """Checks the codec, version and size of a payload.

    Raises:
        PayloadInvalid: if one is wrong.
    """
    if (payload.codec, payload.version) != (name, version):
        raise PayloadInvalid(f"not a payload of {name} version {version}")
    if payload.size != size:
        raise PayloadInvalid(f"{name}: size of the payload does not match the segment")


def check_kinds(payload: Payload, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Returns the parts of a payload after checking their types.

    Raises:
        PayloadInvalid: if a part has another type or is not one-dimensional.
    """
    if tuple(str(part.dtype) for part in payload.parts) != kinds or any(part.ndim != 1 for part in payload.parts):
        raise PayloadInvalid(f"{payload.codec}: parts must be {', '.join(kinds)}")
    return payload.parts


def check_finite(payload: Payload, numbers: Tensor) -> None:
    """Checks that numbers are finite.

    Raises:
        PayloadInvalid: if one is not.
    """
    if not bool(numbers.isfinite().all()):
        raise PayloadInvalid(f"{payload.codec}: number not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A flat part of the gradients.

    Attributes:
        index: Index of the bucket, from 0.
        flat: float32, [n].
        matrices: First element, rows and columns of each parameter.
        offsets: Where the segments begin, and the end; multiples of `BLOCK` except for the end.
    """

    index: int
    flat: Tensor
    matrices: Sequence[tuple[int, int, int]]
    offsets: Sequence[int]


class BaseCodec:
    """Base of all codecs. Codecs are stateless: their memory is the `State` passed to them.

    Attributes:
        name: Name in settings.
        version: Version of the payload format.
        residual_name: Name of the residual in the state; None if everything is always sent.
        local_clip: Norm, over the square root of the number of ranks, to which each rank's gradients are clipped before
            encoding; None if the sum can be clipped instead: nothing is accumulated, and no rank's norm matters.
    """

    name: str
    version: int
    residual_name: str | None = RESIDUAL
    local_clip: float | None = None

    def correct(self, state: State, gradient: Tensor, begin: int, out: Tensor) -> None:
        """Writes the gradient that the optimiser gets in a round that bypasses this codec.

        This is the gradient itself, unless the codec applies the momentum. The residual is not added.

        Args:
            state: State of a bucket; changed in place.
            gradient: Part of the bucket, [n].
            begin: First element of that part.
            out: float32 [n]; may be the gradient.
        """
        out.copy_(gradient)

    def release(self, gradient: Tensor, state: State) -> None:
        """Adds the residual to a gradient, in place, and clears it."""
        if self.residual_name is not None:
            gradient.add_(state[self.residual_name])
            state[self.residual_name].zero_()


class SegmentCodec(BaseCodec, ABC):
    """Encodes segments for a shard to sum."""

    @abstractmethod
    def new_state(self, like: Tensor) -> State:
        """Returns the initial state of a bucket with the length and device of `like`."""

    @abstractmethod
    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """Encodes a bucket into one payload per segment; what is not sent stays in `state`.

        Args:
            gradient: float32 [n], finite; may be overwritten.
            state: State of the bucket; changed in place.
            offsets: Where the segments begin, and the end.
            round_: The round.
        """

    @abstractmethod
    def add(self, payload: Payload, out: Tensor) -> None:
        """Adds a decoded payload to a segment, float32 [size], in place.

        Raises:
            PayloadInvalid: if the payload is malformed; nothing is added then.
        """

    @abstractmethod
    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Returns a payload that was not summed to the state of its bucket, whose segment begins at `begin`."""

    @abstractmethod
    def reply(self) -> SegmentCodec:
        """Returns the codec of the reply; its state is held by the shard."""


class LinearCodec(BaseCodec, ABC):
    """Transforms gradients into tensors that can be summed without decoding.

    Attributes:
        shared: Names of state tensors that are identical on all ranks and may have any length.
    """

    shared: tuple[str, ...] = ()

    @abstractmethod
    def new_state(self, bucket: Bucket) -> State:
        """Returns the initial state of a bucket."""

    @abstractmethod
    def reduce(self, bucket: Bucket, state: State, all_reduce: Callable[[Tensor], None], round_: Round) -> None:
        """Replaces a bucket by its sum over the ranks, bit for bit the same on each.

        Args:
            bucket: Its `flat` is changed in place.
            state: State of the bucket; changed in place.
            all_reduce: Sums a tensor over the ranks, in place. All ranks call it with the same shapes in the same order.
            round_: The round.
        """


Codec = SegmentCodec | LinearCodec
Made = TypeVar("Made", bound=CodecSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecEntry(Generic[Made]):
    """A codec's entry in the registry.

    Attributes:
        settings: Settings class; the default of its `codec` is the name.
        make: Builds the codec from its settings.
    """

    settings: type[Made]
    make: Callable[[Made], Codec]

    @property
    def name(self) -> str:
        """Name in settings."""
        return str(self.settings.model_fields["codec"].default)


AnyEntry = CodecEntry[Any]
