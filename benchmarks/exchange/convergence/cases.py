"""What is compared: codecs with their settings and learning rates, and the dense exchange that each is held against.

Invariants: a dense case and what is held against it differ in nothing but the exchange and the learning rate; every
learning rate was chosen among `tried` on `TUNING_SEED`, which is not reported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

TUNING_SEED = 0
SEEDS = (1, 2, 3)
"""That are reported."""
SPREAD_SEEDS = (*SEEDS, 4, 5, 6)
"""Of the dense cases, whose spread is the unit of differences: of three alone it would be a guess."""
WARMUP_SHARE = 0.1
"""Of the steps, over which ratios grow to their own."""
ADAMW: Mapping[str, Any] = {"kind": "adamw"}
SGD: Mapping[str, Any] = {"kind": "sgd", "momentum": 0.5}
"""With the momentum that learned best of 0, 0.5 and 0.9."""
SGD_09: Mapping[str, Any] = {"kind": "sgd", "momentum": 0.9}
"""With that of DGC."""
PLAIN_SGD: Mapping[str, Any] = {"kind": "sgd"}
"""For codecs that hold the momentum."""


class Task(StrEnum):
    """What is learned."""

    TEXT = "text"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A line of the table.

    Attributes:
        name: Of it, in its task.
        task: What is learned.
        exchange: As a run's settings have it; the warm-up of the ratio is added.
        optimizer: As a run's settings have it.
        rate: Peak learning rate.
        ranks: That exchange.
        max_norm: Gradients are scaled down to it, where the codec does not scale each rank's own.
        tried: Learning rates among which it was chosen.
        dense: Name of the case that it is held against; empty for such a case.
        claimed: Whether it is claimed to learn as well as the dense case.
        trap: Whether settings of a run refuse it, and the table shows why.
    """

    name: str
    task: Task
    exchange: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    rate: float
    ranks: int = 4
    max_norm: float = 1.0
    tried: Sequence[float] = ()
    dense: str = ""
    claimed: bool = False
    trap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is learned; a short form is there to see that everything works.

    Attributes:
        steps: Optimiser steps of a rank on text; training steps of the run on arithmetic.
        rounds: Optimiser steps of a rank in these, and exchanges, but for an outer loop.
        every: Steps between validations.
    """

    steps: int
    rounds: int
    every: int


SIZES = {
    Task.TEXT: Size(steps=400, rounds=400, every=50),
    # Four minibatches, so four optimiser steps, of each training step.
    Task.ARITHMETIC: Size(steps=40, rounds=160, every=10),
}
SHORT_SIZES = {Task.TEXT: Size(steps=20, rounds=20, every=10), Task.ARITHMETIC: Size(steps=2, rounds=8, every=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training: a case with a seed and a learning rate."""

    case: Case
    seed: int
    size: Size
    rate: float

    @property
    def exchange(self) -> dict[str, Any]:
        """Settings of the exchange, with a warm-up that fits the run."""
        rounds = self.size.rounds / self.case.exchange.get("outer", {}).get("steps", 1)
        warmup_rounds = max(1, round(WARMUP_SHARE * rounds))
        return {**self.case.exchange, "policy": {"kind": "fixed", "warmup_rounds": warmup_rounds}}

    @property
    def file(self) -> str:
        """Names it by all that it is made of, in the folder of its task."""
        facts = {
            "exchange": self.exchange,
            "optimizer": self.case.optimizer,
            "max_norm": self.case.max_norm,
            "ranks": self.case.ranks,
            **asdict(self.size),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=dict).encode()).hexdigest()[:10]
        return f"{self.case.task}/{self.case.name.replace(' ', '-')}-{self.seed}-{self.rate:g}-{digest}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Results of a cell.

    Attributes:
        final: Loss on held-out text, nats per byte; or mean reward of the last steps, 0 to 1.
        curve: Steps, and that loss or the reward on held-out tasks then.
        sent_bytes: Of a rank in each step, in the mean.
        late_sent_bytes: In each step of the second half, when ratios have grown.
        held_out: Share of held-out tasks that are right at the end; None where `final` is of what is held out.
        events: When compression was switched off and on again, as the run was told.
        seconds: Wall time.
        weights: Of the model at the end, all of them one after another, float32; None on arithmetic, and where they are
            not read.
    """

    final: float
    curve: Sequence[tuple[int, float]]
    sent_bytes: float
    late_sent_bytes: float
    held_out: float | None = None
    events: Sequence[str] = ()
    seconds: float = field(default=0.0, compare=False)
    weights: bytes | None = field(default=None, compare=False, repr=False)


def switches(events: Iterable[str]) -> tuple[str, ...]:
    """Returns those events that say that compression was switched off or on again."""
    return tuple(event for event in events if event.startswith("compression "))


def _text(name: str, exchange: Mapping[str, Any], optimizer: Mapping[str, Any], rate: float, **more: Any) -> Case:
    return Case(name=name, task=Task.TEXT, exchange=exchange, optimizer=optimizer, rate=rate, **more)


DENSE_ADAMW, DENSE_SGD = "none adamw", "none sgd"
OUTER: Mapping[str, Any] = {"codec": "topk_quantised", "ratio": 50.0, "outer": {"kind": "outer", "steps": 10}}
DGC_50: Mapping[str, Any] = {"codec": "dgc", "ratio": 50.0}
# Sends 50 times fewer bytes of this small model, of which vectors are sent as they are.
DGC_60: Mapping[str, Any] = {"codec": "dgc", "ratio": 60.0}
DGC_100: Mapping[str, Any] = {"codec": "dgc", "ratio": 100.0}
# Save 50 times the bytes of both ways with four ranks. Their learning rate is that of 100x; no other was tried.
DGC_200: Mapping[str, Any] = {"codec": "dgc", "ratio": 200.0}
DGC_DOWN: Mapping[str, Any] = {"codec": "dgc", "ratio": 100.0, "ratio_down": 100.0}
TEXT_CASES = (
    _text(DENSE_ADAMW, {"codec": "none"}, ADAMW, 2e-3, tried=(1e-3, 2e-3, 3e-3, 5e-3)),
    _text("bf16", {"codec": "bf16"}, ADAMW, 2e-3, dense=DENSE_ADAMW, claimed=True),
    _text("fp16", {"codec": "fp16"}, ADAMW, 2e-3, dense=DENSE_ADAMW, claimed=True),
    _text("qsgd 8 bits", {"codec": "qsgd", "bits": 8}, ADAMW, 2e-3, dense=DENSE_ADAMW, claimed=True),
    _text("qsgd 4 bits", {"codec": "qsgd", "bits": 4}, ADAMW, 2e-3, dense=DENSE_ADAMW),
    _text("double_quantization", {"codec": "double_quantization"}, ADAMW, 2e-3, dense=DENSE_ADAMW),
    _text("outer topk_quantised", OUTER, ADAMW, 5e-3, tried=(1e-3, 2e-3, 3e-3, 5e-3), dense=DENSE_ADAMW),
    _text("topk 100x adamw", {"codec": "topk"}, ADAMW, 2e-3, tried=(1e-3, 2e-3), dense=DENSE_ADAMW, trap=True),
    _text(DENSE_SGD, {"codec": "none"}, SGD, 0.5, tried=(0.3, 0.5, 0.8)),
    _text("sgd momentum 0.9", {"codec": "none"}, SGD_09, 0.1, tried=(0.05, 0.1, 0.2), dense=DENSE_SGD),
    _text("dgc 50x", DGC_50, PLAIN_SGD, 0.3, tried=(0.2, 0.3, 0.5), dense=DENSE_SGD),
    _text("dgc 60x", DGC_60, PLAIN_SGD, 0.3, tried=(0.2, 0.3, 0.5), dense=DENSE_SGD, claimed=True),
    _text("dgc 100x", DGC_100, PLAIN_SGD, 0.3, tried=(0.1, 0.3, 0.5), dense=DENSE_SGD, claimed=True),
    _text("dgc 200x", DGC_200, PLAIN_SGD, 0.3, dense=DENSE_SGD),
    _text("dgc 100x down 100x", DGC_DOWN, PLAIN_SGD, 0.3, dense=DENSE_SGD),
    _text("topk 100x", {"codec": "topk"}, SGD, 0.5, tried=(0.2, 0.5), dense=DENSE_SGD),
    _text("topk_quantised 100x", {"codec": "topk_quantised"}, SGD, 0.5, tried=(0.2, 0.5, 0.8), dense=DENSE_SGD),
    _text("powersgd rank 4", {"codec": "powersgd"}, SGD, 0.5, tried=(0.2, 0.5, 0.8), dense=DENSE_SGD),
    _text("lowrank_quantised rank 4", {"codec": "lowrank_quantised"}, SGD, 0.5, dense=DENSE_SGD),
)


def _arithmetic(
    name: str, exchange: Mapping[str, Any], optimizer: Mapping[str, Any], rate: float, *, ranks: int = 2, **more: Any
) -> Case:
    # The model is so small that its embedding would be sent as it is, and be most of what is sent.
    exchange = {**exchange, **({} if exchange["codec"] == "none" else {"dense_below": 1024})}
    return Case(name=name, task=Task.ARITHMETIC, exchange=exchange, optimizer=optimizer, rate=rate, ranks=ranks, **more)


FOUR_RANKS = f"{DENSE_SGD} of four"
SGD_RATES = (0.01, 0.03, 0.1, 0.2, 0.3)
ARITHMETIC_CASES = (
    # The rate of the example itself.
    _arithmetic(DENSE_ADAMW, {"codec": "none"}, ADAMW, 3e-4, tried=(3e-4, 6e-4)),
    _arithmetic("bf16", {"codec": "bf16"}, ADAMW, 3e-4, dense=DENSE_ADAMW, claimed=True),
    _arithmetic("fp16", {"codec": "fp16"}, ADAMW, 3e-4, dense=DENSE_ADAMW, claimed=True),
    _arithmetic("qsgd 8 bits", {"codec": "qsgd", "bits": 8}, ADAMW, 3e-4, dense=DENSE_ADAMW, claimed=True),
    _arithmetic("qsgd 4 bits", {"codec": "qsgd", "bits": 4}, ADAMW, 3e-4, dense=DENSE_ADAMW),
    _arithmetic("double_quantization", {"codec": "double_quantization"}, ADAMW, 3e-4, dense=DENSE_ADAMW),
    _arithmetic(DENSE_SGD, {"codec": "none"}, SGD, 0.1, tried=SGD_RATES),
    _arithmetic(
        "dgc 50x", {"codec": "dgc", "ratio": 50.0}, PLAIN_SGD, 0.1, tried=SGD_RATES, dense=DENSE_SGD, claimed=True
    ),
    _arithmetic("dgc 100x", {"codec": "dgc"}, PLAIN_SGD, 0.1, tried=SGD_RATES, dense=DENSE_SGD, claimed=True),
    _arithmetic("topk 100x", {"codec": "topk"}, SGD, 0.1, dense=DENSE_SGD),
    _arithmetic("topk_quantised 100x", {"codec": "topk_quantised"}, SGD, 0.1, dense=DENSE_SGD),
    _arithmetic("powersgd rank 4", {"codec": "powersgd"}, SGD, 0.1, dense=DENSE_SGD),
    _arithmetic("lowrank_quantised rank 4", {"codec": "lowrank_quantised"}, SGD, 0.1, dense=DENSE_SGD),
    _arithmetic(FOUR_RANKS, {"codec": "none"}, SGD, 0.1, ranks=4),
    _arithmetic("dgc 100x of four", {"codec": "dgc"}, PLAIN_SGD, 0.1, ranks=4, dense=FOUR_RANKS, claimed=True),
    _arithmetic(
        "dgc 200x of four", {"codec": "dgc", "ratio": 200.0}, PLAIN_SGD, 0.1, ranks=4, dense=FOUR_RANKS, claimed=True
    ),
)
CASES = (*TEXT_CASES, *ARITHMETIC_CASES)
