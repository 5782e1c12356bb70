"""Figures for policies: histories of rounds that a seed draws, and a policy that is played through them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from fulmen_exchange.codecs.dgc import DgcSettings
from fulmen_exchange.codecs.qsgd import QsgdSettings
from fulmen_exchange.codecs.topk import TopkSettings
from fulmen_exchange.policies.decision import Decision, RoundStats, Seconds
from fulmen_exchange.policies.policy import Policy, make_policy
from fulmen_exchange.policies.settings import (
    AdaptivePolicy,
    AnomalySettings,
    AutoPolicy,
    FixedPolicy,
    RollbackOnDrop,
    StagesPolicy,
)

QUICK: dict[str, Any] = {
    "warmup_rounds": 8,
    "anomaly": AnomalySettings(window=5, cool_down=7, times=2),
    "rollback": RollbackOnDrop(kind="rollback", drop=0.2, window=2, cool_down=9),
}
POLICIES = {
    "fixed": FixedPolicy(**QUICK),
    "stages": StagesPolicy(kind="stages", **QUICK),
    "adaptive": AdaptivePolicy(kind="adaptive", patience=2, residual_window=4, cool_down=11, **QUICK),
    "auto": AutoPolicy(kind="auto", measure_every=25, measure_share=0.5, **QUICK),
}
CODECS = {"topk": TopkSettings, "dgc": DgcSettings, "qsgd": QsgdSettings}


def policy_of(kind: str, *, codec: str = "dgc", full_sync_every: int = 13, optimizer: str = "sgd") -> Policy:
    """Makes a policy of which everything happens soon."""
    settings = CODECS[codec](policy=POLICIES[kind], full_sync_every=full_sync_every)
    return make_policy(settings, optimizer=optimizer, world_size=4, gradient_bytes=4e6)


def calm(number: int, **more: Any) -> RoundStats:
    """Makes stats of a round in which nothing is out of the ordinary."""
    given = {"number": number, "progress": min(1.0, number / 200), "gradient_norms": (1.0, 1.1), "captured": 0.4}
    return RoundStats(**{**given, **more})


def history(seed: int, rounds: int) -> list[RoundStats]:
    """Draws rounds in which everything happens: explosions, vanishing and missing numbers, falls of the metric."""
    rng = np.random.default_rng(seed)
    found, scale, metric = [], 1.0, 1.0
    for number in range(1, rounds + 1):
        if rng.random() < 0.08:
            scale = float(rng.choice([1.0, 1e4, 1e-5]))
        if rng.random() < 0.05:
            metric = float(rng.choice([1.0, 0.2]))
        norms = tuple(float(each) for each in scale * rng.lognormal(0, 0.3, 4))
        if rng.random() < 0.02:
            norms = (*norms[:3], float("nan"))
        seconds = Seconds(**{name: float(rng.uniform(0.01, 1)) for name in ("compute_s", "codec_s", "transfer_s")})
        found.append(
            RoundStats(
                number=number,
                progress=number / rounds,
                gradient_norms=norms,
                captured=float(rng.uniform(0, 1)) if rng.random() < 0.9 else None,
                residual=float(rng.uniform(0, 1)) * number,
                sparsity=float(rng.uniform(0, 1)) if rng.random() < 0.2 else None,
                metric=metric + float(rng.normal(0, 0.02)) if rng.random() < 0.5 else None,
                seconds=seconds if rng.random() < 0.9 else None,
            )
        )
    return found


def play(policy: Policy, stats: list[RoundStats]) -> list[Decision]:
    """Decides on round after round."""
    return [policy.decide(one) for one in stats]


def stored(policy: Policy) -> dict[str, object]:
    """Returns the state as a checkpoint gives it back."""
    return json.loads(json.dumps(policy.state(), allow_nan=False))


def with_norm(stats: RoundStats, norm: float) -> RoundStats:
    """Replaces the norms of all ranks."""
    return replace(stats, gradient_norms=(norm,))
