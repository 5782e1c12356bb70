"""Decompresses untrusted data; sizes are checked before anything is allocated."""

from __future__ import annotations

__all__ = ["FrameInvalid", "decompress"]


class FrameInvalid(ValueError):
    """Bytes are not a zstd frame, or are too large when decompressed."""


def decompress(frame: bytes, *, max_bytes: int) -> bytes:
    """Returns the content of a zstd frame, whose header must contain its size.

    Raises:
        FrameInvalid: If it is not a frame, or its content exceeds `max_bytes`.
    """
    import zstandard  # not needed by most programs that import the SDK

    try:
        # The library allocates as many bytes as the header declares, whatever the limit of the output.
        if not 0 <= zstandard.frame_content_size(frame) <= max_bytes:
            raise FrameInvalid(f"has no size, or more than {max_bytes} bytes")
        content: bytes = zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes)
    except zstandard.ZstdError:
        raise FrameInvalid("is not a zstd frame") from None
    return content
