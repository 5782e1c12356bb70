"""Checks common to the payloads of all codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulmen_exchange.codecs.codec import Payload, PayloadInvalid

if TYPE_CHECKING:
    from torch import Tensor

INT8, UINT8, INT16 = "torch.int8", "torch.uint8", "torch.int16"
BFLOAT16, FLOAT32 = "torch.bfloat16", "torch.float32"


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
