"""What every codec asks of a payload before it reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulmen_exchange.codecs.codec import Payload, PayloadInvalid

if TYPE_CHECKING:
    from torch import Tensor

INT8, UINT8, INT16 = "torch.int8", "torch.uint8", "torch.int16"
BFLOAT16, FLOAT32 = "torch.bfloat16", "torch.float32"


def check_frame(payload: Payload, *, name: str, version: int, size: int) -> None:
    """Sees to it that a payload is of a codec and as long as the segment that it is read into.

    Raises:
        PayloadInvalid: if it is not.
    """
    if (payload.codec, payload.version) != (name, version):
        raise PayloadInvalid(f"not a payload of {name} version {version}")
    if payload.size != size:
        raise PayloadInvalid(f"a payload of {name} is not as long as its segment")


def check_kinds(payload: Payload, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Returns the parts of a payload, which are one-dimensional and of these kinds.

    Raises:
        PayloadInvalid: if they are not.
    """
    if tuple(str(part.dtype) for part in payload.parts) != kinds or any(part.ndim != 1 for part in payload.parts):
        raise PayloadInvalid(f"a payload of {payload.codec} is {', '.join(kinds)}")
    return payload.parts


def check_finite(payload: Payload, numbers: Tensor) -> None:
    """Sees to it that numbers can be added to anything.

    Raises:
        PayloadInvalid: if one of them is not finite.
    """
    if not bool(numbers.isfinite().all()):
        raise PayloadInvalid(f"a payload of {payload.codec} has a number that is not finite")
