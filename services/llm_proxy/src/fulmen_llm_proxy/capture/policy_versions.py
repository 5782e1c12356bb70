"""Which policy version sampled which tokens.

What the backend says has precedence. One that says nothing sampled with the version that its target
had when the call was sent; if the target's version changed while the call ran, the tokens that had
come by then are of the old version and those that came later of the new one. That is exact as long
as the version is promoted while the engine is paused, and the caller reads as fast as the engine
writes. Of a whole answer nobody can tell at which token the change came: its record names both
versions, and says that it may not be trained on.
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
    """Returns the versions of one choice of a stream, in order; empty ranges are left out.

    Args:
        piece_lengths: tokens in each piece of token ids, in the order in which they came.
        first_version: the version when the call was sent.
        changes: in the order in which they came.
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
    """Returns the versions of a choice of a whole answer during which they changed.

    The first is given every token, the others none: they were in force by the end.
    """
    first, *others = versions
    return (
        VersionRange(version=first, start=0, end=total),
        *(VersionRange(version=version, start=total, end=total) for version in others),
    )
