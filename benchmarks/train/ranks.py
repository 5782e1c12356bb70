"""The arithmetic example with ranks that exchange compressed gradients, through the four services.

What is learned with two and with four ranks, the bytes that a rank sends, and how many bytes of float32 each stands for.
Beside it, seed by seed and codec by codec, is `benchmarks.exchange.convergence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import outcome
from benchmarks.train.configs import EXAMPLES
from benchmarks.train.stand import Stage, say, standing

CONFIG = EXAMPLES / "arithmetic" / "train_ranks.toml"
SLOTS = 64
SEED = 1
RANKS = (2, 4)
SHORT_STEPS = ("--set", "sft.steps=400", "--set", "sft.warmup_steps=40", "--set", "grpo.steps=12")
AFTER = 0.9
"""Greedy accuracy on held-out tasks, at least: less than the 0.95 of AdamW, whose moments `dgc` does without."""
RATIO = 50.0


def run(*, short: bool) -> tuple[dict[str, Any], list[outcome.Claim]]:
    """Trains with either number of ranks; the short form with two, for fewer steps, and claims nothing of what is learned."""
    raw: dict[str, Any] = {}
    claims: list[outcome.Claim] = []
    with standing("--slots", str(SLOTS)) as stand:
        for ranks in RANKS[:1] if short else RANKS:
            name = f"{ranks} ranks"
            given = ("--seed", str(SEED), "--set", f"grpo.parallel.ranks={ranks}", *(SHORT_STEPS if short else ()))
            found = raw[name] = _metrics(stand.train(CONFIG, f"ranks-{ranks}", *given)[-1])
            say(f"{name}: {found['before']:.2f} -> {found['after']:.2f}, {found['ratio']:.0f}x fewer bytes")
            if not short:
                claims += [
                    outcome.claim(
                        f"validation accuracy after GRPO, {name}", found["after"], "share", goal=AFTER, better="higher"
                    ),
                    outcome.claim(
                        f"fewer bytes than float32, {name}, second half",
                        found["ratio"],
                        "x",
                        goal=RATIO,
                        better="higher",
                    ),
                ]
    return raw, claims


def _metrics(stage: Stage) -> dict[str, Any]:
    told = [step.values for step in stage.steps if "exchange_sent_bytes" in step.values]
    late = told[len(told) // 2 :]
    return {
        "before": stage.results["validation_accuracy_before"],
        "after": stage.results["validation_accuracy_after"],
        "seconds": round(stage.seconds, 1),
        "curve": [(round(at_s, 1), accuracy) for at_s, accuracy in stage.curve()],
        "ratio": round(_sum(late, "exchange_raw_bytes") / _sum(late, "exchange_sent_bytes"), 1),
        "sent_bytes_per_step": round(stage.mean("exchange_sent_bytes")),
        "spent_s": {kind: round(seconds, 1) for kind, seconds in stage.spent_s.items()},
    }


def _sum(steps: Sequence[Mapping[str, float]], metric: str) -> float:
    return sum(step[metric] for step in steps)
