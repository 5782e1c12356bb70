"""The request to publish weights and its result, as plain values importable without torch."""

from dataclasses import dataclass

from fulmen_algorithm.training.settings import WeightsKind


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrder:
    """How to write weights.

    Attributes:
        dtype: Type of the written weights: `float32` or `bfloat16`.
        base_sha256: Checksum of the base of a delta; empty for complete weights.
        dense_above: Share of the complete weights' bytes above which complete weights are written instead of a delta.
        keep: Whether the weights are kept in memory as the base of a later delta.
        merged: Whether to merge the adapters and write a complete model folder.
        adapters: Folder of earlier adapters to merge; empty for the present ones.
    """

    dtype: str = "float32"
    base_sha256: str = ""
    dense_above: float = 0.5
    keep: bool = False
    merged: bool = False
    adapters: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    """Result of writing weights.

    Attributes:
        kind: `full` even if a delta was requested, but its base is unavailable or it would be too large.
        sha256: Checksum of the complete weights in the dtype of the order.
        size_bytes: Size of the tensor files.
        full_bytes: Size of the complete weights.
        changed_share: Share of the elements that differ from the base; 1 without a base.
        base_sha256: delta: checksum of the weights to which it applies.
        adapters: Names of the adapters' folders.
    """

    kind: WeightsKind
    sha256: str
    size_bytes: int
    full_bytes: int
    changed_share: float = 1.0
    base_sha256: str = ""
    adapters: tuple[str, ...] = ()
