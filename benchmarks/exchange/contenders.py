"""Who is measured: computing alone, PyTorch's own ways to exchange gradients, and the package's codecs on its links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class By(StrEnum):
    """Whose exchange it is."""

    NOBODY = "nobody"
    PYTORCH = "pytorch"
    FULMEN = "fulmen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to take a step.

    Attributes:
        name: As tables name it.
        by: Whose it is.
        codec: Registered name of the package's codec, or what PyTorch does.
        settings: Of the package's codec, where they are not the defaults.
        link: `torch` (Gloo, as PyTorch's), or `grpc` with a shard beside each rank.
        hook: Whether the exchange is DDP's communication hook; otherwise it is as trainers of the service have it.
        overlap: Whether the hook sums buckets during the backward pass.
        slow: Whether it sends so much that it is left out where each packet is also late: it would take minutes to
            see what the line without latency shows.
        short: Whether it is in the short form, too.
    """

    name: str
    by: By
    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    link: str = "torch"
    hook: bool = False
    overlap: bool = False
    slow: bool = False
    short: bool = False

    @property
    def chooses(self) -> bool:
        """Whether it measures the ways to send first, and then takes one."""
        return self.settings.get("policy", {}).get("kind") == "auto"


AS_SET = {"policy": {"kind": "fixed", "warmup_rounds": 0}}
"""The ratio at once, as it is after the warm-up."""


def _ours(
    name: str, codec: str, *, link: str = "torch", slow: bool = False, short: bool = False, **more: Any
) -> Contender:
    settings = {"codec": codec, **AS_SET, **more}
    return Contender(name=name, by=By.FULMEN, codec=codec, settings=settings, link=link, slow=slow, short=short)


def _theirs(name: str, what: str, *, short: bool = False) -> Contender:
    return Contender(name=name, by=By.PYTORCH, codec=what, short=short)


COMPUTE = Contender(name="computing alone", by=By.NOBODY, codec="none", short=True)
DDP = _theirs("DDP fp32", "fp32", short=True)
DDP_BF16 = _theirs("DDP bf16", "bf16", short=True)
DDP_POWERSGD = _theirs("DDP PowerSGD rank 1", "powersgd", short=True)
GRPC_NONE = _ours("none, gRPC", "none", link="grpc", slow=True, short=True)
DGC = _ours("dgc 100x", "dgc", ratio=100.0, short=True)
AUTO = _ours("auto", "dgc", ratio=100.0, policy={"kind": "auto", "warmup_rounds": 0}, short=True)
POWERSGD = _ours("powersgd rank 1", "powersgd", matrix_rank=1)
TOPK_QUANTISED = _ours("topk_quantised 100x", "topk_quantised", ratio=100.0)
CONTENDERS = {
    each.name: each
    for each in (
        COMPUTE,
        DDP,
        DDP_BF16,
        DDP_POWERSGD,
        _ours("none", "none", short=True),
        _ours("bf16", "bf16", slow=True),
        _ours("topk 100x", "topk", ratio=100.0),
        _ours("dgc 50x", "dgc", ratio=50.0, slow=True),
        DGC,
        _ours("dgc 200x", "dgc", ratio=200.0, slow=True),
        _ours("qsgd 8 bits", "qsgd", bits=8),
        _ours("qsgd 4 bits", "qsgd", bits=4, slow=True),
        POWERSGD,
        TOPK_QUANTISED,
        AUTO,
        GRPC_NONE,
        _ours("dgc 100x, gRPC", "dgc", ratio=100.0, link="grpc", short=True),
        _ours("topk_quantised 100x, gRPC", "topk_quantised", ratio=100.0, link="grpc"),
    )
}


def _hooked(name: str, codec: str, **more: Any) -> list[Contender]:
    settings = {"codec": codec, **AS_SET, **more}
    return [
        Contender(
            name=f"{name}, {'overlapped' if overlap else 'hook'}",
            by=By.FULMEN,
            codec=codec,
            settings=settings,
            hook=True,
            overlap=overlap,
        )
        for overlap in (False, True)
    ]


HOOKED = {
    each.name: each
    for each in (
        COMPUTE,
        DDP,
        *_hooked("dgc 100x", "dgc", ratio=100.0),
        *_hooked("topk_quantised 100x", "topk_quantised", ratio=100.0),
        *_hooked("qsgd 8 bits", "qsgd", bits=8),
    )
}
"""Those of `benchmarks.exchange.overlap`: each codec in DDP's hook, after the backward pass and during it."""
