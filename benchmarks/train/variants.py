"""Variants of the algorithm on the arithmetic example: the same base, the same tasks, the same number of rollouts.

In one process (`learning.py`): the algorithm, trainer and sampling of the services, without transport. Settings were
chosen on seeds other than those that are reported; docs/learning.md says how many were tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks import outcome
from benchmarks.train import learning
from benchmarks.train.stand import say

EXAMPLE = "arithmetic"
SEEDS = (1, 2, 3)
GOAL = 0.95
SETTINGS: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "rloo": (),
    "gspo": ('loss={kind="gspo",low=0.01,high=0.02}',),
    "cispo": (),
}
"""What differs from the example's own settings, by algorithm; `setting=value` as in TOML."""

SHORTER = ("steps=20",)


def run(*, short: bool) -> tuple[dict[str, Any], list[outcome.Claim]]:
    """Trains each variant with each seed; the short form takes one seed and fewer steps."""
    torch.set_num_threads(1)
    raw: dict[str, Any] = {}
    claims = []
    for algorithm, settings in SETTINGS.items():
        found = []
        for seed in SEEDS[:1] if short else SEEDS:
            config = learning.example(
                EXAMPLE, algorithm=algorithm, assignments=[*settings, *(SHORTER if short else ())], seed=seed
            )
            where = f"{algorithm} {EXAMPLE}-{seed}"
            result = asyncio.run(
                learning.train(config, cache=learning.CACHE, report=partial(learning.say_now_and_then, where))
            )
            say(f"{where}: {result.before:.2f} -> {result.after:.2f}")
            found.append(asdict(result))
        raw[algorithm] = {"settings": list(settings), "seeds": found}
        worst = min(one["after"] for one in found)
        name = f"validation accuracy after {algorithm}, {EXAMPLE}, worst of {len(found)} seeds"
        claims.append(outcome.claim(name, worst, "share", goal=GOAL, better="higher"))
    return raw, claims
