"""What the examples learn through the four services: imitation, then reinforcement learning, for several seeds.

Greedy accuracy on held-out tasks before and after the second stage, the loss that the first one reaches, wall time of
both, model calls per training row, and the shares of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import outcome
from benchmarks.train.configs import EXAMPLES
from benchmarks.train.stand import Stage, say, standing

SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What an example claims, for the worst of its seeds.

    Attributes:
        sft_loss: Loss at the end of imitation, nats per token, at most.
        before: Validation accuracy before reinforcement learning, at most.
        after: After it, at least.
        minutes: Wall time of both stages, at most.
        calls_per_row: Model calls that one training row holds, at least.
        seeds: Seeds that are reported: none of those on which settings were chosen.
    """

    sft_loss: float
    before: float
    after: float
    minutes: float
    calls_per_row: float = 1.0
    seeds: tuple[int, ...] = (1, 2, 3)


GOALS = {
    "arithmetic": Goal(sft_loss=0.1, before=0.6, after=0.95, minutes=6),
    "calculator": Goal(sft_loss=0.03, before=0.6, after=0.85, minutes=8, calls_per_row=5.0, seeds=(4, 5, 6)),
    "orders": Goal(sft_loss=0.08, before=0.6, after=0.75, minutes=6),
    "two_roles": Goal(sft_loss=0.1, before=0.6, after=0.75, minutes=3, seeds=(21, 22, 23)),
}
SHORT = ("two_roles",)
GAIN = 0.25


def run(*, short: bool) -> tuple[dict[str, Any], list[outcome.Claim]]:
    """Trains every example with every seed; the short form takes one of each."""
    raw: dict[str, Any] = {}
    claims: list[outcome.Claim] = []
    with standing("--slots", str(SLOTS)) as stand:
        for example in SHORT if short else GOALS:
            goal = GOALS[example]
            found = []
            for seed in goal.seeds[:1] if short else goal.seeds:
                config = EXAMPLES / example / "train.toml"
                stages = stand.train(config, f"{example}-{seed}", "--seed", str(seed))
                found.append(_metrics(stages, seed))
                say(f"{example}-{seed}: {found[-1]['before']:.2f} -> {found[-1]['after']:.2f}")
            raw[example] = found
            claims += _claims(example, goal, found)
    return raw, claims


def _metrics(stages: Sequence[Stage], seed: int) -> dict[str, Any]:
    imitation, reinforcement = stages[0], stages[-1]
    spent, results = reinforcement.spent_s, reinforcement.results
    before, after = results["validation_accuracy_before"], results["validation_accuracy_after"]
    return {
        "seed": seed,
        "sft_loss": round(imitation.results["loss"], 4),
        "before": before,
        "after": after,
        "gain": round(after - before, 4),
        "minutes": round(sum(stage.seconds for stage in stages) / 60, 2),
        "seconds_by_stage": {stage.algorithm: round(stage.seconds, 1) for stage in stages},
        "curve": [(round(at_s, 1), accuracy) for at_s, accuracy in reinforcement.curve()],
        "calls_per_row": round(reinforcement.mean("calls_per_row"), 2),
        "packing_efficiency": round(reinforcement.mean("packing_efficiency"), 3),
        "rollouts_per_second": round(reinforcement.mean("rollouts_per_second"), 1),
        "spent_s": {kind: round(seconds, 1) for kind, seconds in spent.items()},
        "trainer_share": round(spent.get("train", 0.0) / max(sum(spent.values()), 1e-9), 3),
    }


def _claims(example: str, goal: Goal, found: Sequence[dict[str, Any]]) -> list[outcome.Claim]:
    def worst(metric: str, pick: Any) -> float:
        return float(pick(one[metric] for one in found))

    tail = f"{example}, worst of {len(found)} seeds"
    claims = [
        outcome.claim(f"loss after SFT, {tail}", worst("sft_loss", max), "nats", goal=goal.sft_loss, better="lower"),
        outcome.claim(f"validation accuracy before GRPO, {tail}", worst("before", max), "share", goal=goal.before, better="lower"),
        outcome.claim(f"validation accuracy after GRPO, {tail}", worst("after", min), "share", goal=goal.after, better="higher"),
        outcome.claim(f"gain by GRPO, {tail}", worst("gain", min), "share", goal=GAIN, better="higher"),
        outcome.claim(f"time of both stages, {tail}", worst("minutes", max), "min", goal=goal.minutes, better="lower"),
    ]  # fmt: skip
    if goal.calls_per_row > 1:
        name = f"model calls per training row (rows saved by merging), {tail}"
        value = worst("calls_per_row", min)
        claims.append(outcome.claim(name, value, "times", goal=goal.calls_per_row, better="higher"))
    return claims
