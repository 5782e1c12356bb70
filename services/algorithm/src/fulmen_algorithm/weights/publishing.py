"""The request to publish weights and its result, as plain values importable without torch."""

from dataclasses import dataclass

from fulmen_algorithm.training.settings import WeightsKind


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrder:
    """How weights are to be written.

    Attributes:
        dtype: In which they are written: `float32` or `bfloat16`.
        base_sha256: Of the weights that a delta may be made against; empty: all of them are written.
        dense_above: A delta of more than this share of the complete weights' bytes is not kept.
        keep: Whether the next order may name these weights as its base; costs a copy of them in memory.
        merged: Adapters are added to the weights that they belong to, and a complete model folder is written.
    """

    dtype: str = "float32"
    base_sha256: str = ""
    dense_above: float = 0.5
    keep: bool = False
    merged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    """Result of writing weights.

    Attributes:
        kind: `full` also where a delta was requested, but its base is unavailable or it would be too large.
        sha256: Of the weights in the dtype of the order; the same for a delta and for all of them.
        size_bytes: Of the tensors' files.
        full_bytes: Size of the complete weights.
        changed_share: Share of the elements that differ from the base; 1 without a base.
        base_sha256: delta: of the weights that it applies to.
        adapters: Names of the adapters' folders.
    """

    kind: WeightsKind
    sha256: str
    size_bytes: int
    full_bytes: int
    changed_share: float = 1.0
    base_sha256: str = ""
    adapters: tuple[str, ...] = ()
