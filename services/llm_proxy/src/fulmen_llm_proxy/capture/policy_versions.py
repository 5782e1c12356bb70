"""Which policy version sampled which tokens.

The backend's report takes precedence. Without one, the tokens belong to the version that the target had when the call
was sent. If that version changed during a stream, tokens received before the change belong to the old version and
later ones to the new. This is exact if versions are promoted while the engine is paused and the caller reads as fast as
the engine writes. In a complete answer the position of the change is unknown: its record names both versions and is
marked as unusable for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from fulmen_llm_proxy.apis.collected import PolicyChange


class VersionRange(msgspec.Struct, frozen=True):
    """The policy version that sampled the completion tokens `start` (included) to `end` (not)."""

    version: int
    start: int
    end: int


def observed_versions(
    index: int, piece_lengths: Sequence[int], first_version: int, changes: Sequence[PolicyChange]
) -> tuple[VersionRange, ...]:
    """Returns the versions of a streamed choice, in order, without empty ranges.

    Args:
        piece_lengths: number of tokens of each piece, in order of arrival.
        first_version: version when the call was sent.
        changes: version changes, in order of arrival.
    """
    total = sum(piece_lengths)
    versions = [first_version, *(change.version for change in changes)]
    bounds = [0, *(sum(piece_lengths[: change.pieces.get(index, 0)]) for change in changes), total]
    return tuple(
        VersionRange(version=version, start=start, end=end)
        for version, (start, end) in zip(versions, pairwise(bounds), strict=True)
        if end > start
    )


def spanned_versions(total: int, versions: Sequence[int]) -> tuple[VersionRange, ...]:
    """Returns the versions of a choice of a complete answer during which the version changed.

    The first version gets all tokens; later ones, which were active by the end, get none.
    """
    first, *others = versions
    return (
        VersionRange(version=first, start=0, end=total),
        *(VersionRange(version=version, start=total, end=total) for version in others),
    )
