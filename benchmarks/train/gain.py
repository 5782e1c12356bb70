"""What reinforcement learning adds to imitation on test tasks, with an interval, for the examples that have some.

    python -m benchmarks.train.gain                             # all of them, three seeds each
    python -m benchmarks.train.gain retrieval code --seeds 4    # prints one JSON object per seed, and writes nothing

In one process (`learning.py`). Both policies answer every test task once, greedily; the gain is the mean of the
differences by task, and its interval that of a bootstrap over tasks. Neither training nor the choice of the best version
sees a test task. Cost is the model calls and sampled tokens of all rollouts: of training, validation and test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks import outcome
from benchmarks.train import learning
from benchmarks.train.stand import say
from fulmen_algorithm.algorithms.evaluate import bootstrap
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec

SEEDS = {
    "text_to_sql": (1, 2, 3),
    "retrieval": (4, 5, 6),
    "calculator": (4, 5, 6),
    "code": (1, 2, 3),
    "four_roles": (1, 2, 3),
    "nim": (1, 2, 3),
}
"""By example: seeds on which no setting was chosen."""
SHORT = ("text_to_sql",)
CONFIDENCE, RESAMPLES = 0.95, 10_000
MINUTES = 20.0
"""Wall time that a seed may take."""
LEAST_GAIN = 0.001
"""Lower end of the interval: above 0."""
SHORTER = ("steps=10",)


def run(*, short: bool) -> tuple[dict[str, Any], list[outcome.Claim]]:
    """Trains and tests each seed of each example; the short form takes one, and fewer steps."""
    torch.set_num_threads(1)
    raw: dict[str, Any] = {}
    claims: list[outcome.Claim] = []
    for example in SHORT if short else SEEDS:
        seeds = SEEDS[example][:1] if short else SEEDS[example]
        found = [asyncio.run(measured(example, seed, assignments=SHORTER if short else ())) for seed in seeds]
        tail = f"{example}, worst of {len(found)} seeds"
        lowest, longest = min(one["gain_low"] for one in found), max(one["minutes"] for one in found)
        raw[example] = found
        claims += [
            outcome.claim(f"lower end of the gain by GRPO, {tail}", lowest, "share", goal=LEAST_GAIN, better="higher"),
            outcome.claim(f"time of a seed, {tail}", longest, "min", goal=MINUTES, better="lower"),
        ]
    return raw, claims


async def measured(
    example: str, seed: int, *, assignments: tuple[str, ...] = (), cache: Path | None = None
) -> dict[str, Any]:
    """Trains once and tests both policies; returns what came of it.

    Args:
        example: Folder of an example with test tasks.
        seed: Of all stages.
        assignments: `setting=value` other than the example's.
        cache: Folder of weights after imitation that are kept; None: imitation is part of what is measured.
    """
    config = learning.example(example, assignments=assignments, seed=seed)
    began, cpu_began = perf_counter(), process_time()
    report = partial(learning.say_now_and_then, f"{example}-{seed}")
    with tempfile.TemporaryDirectory(prefix="fulmen-gain-") as folder:
        process = learning.Process(config, Path(folder) / "runs", slots=learning.SLOTS)
        try:
            imitated, loss = await learning.first_stage(
                process, config, config.stages[0], cache or Path(folder) / "models", report=report
            )
            before = await process.tested(imitated)
            policy = PolicySpec(name=config.policy.name, origin=PolicyOrigin.PATH, source=str(imitated))
            trained, events = await process.stage(config.stages[-1], "reinforced", policy, report=report)
            after = await process.tested(Path(trained.model_path))
            curve = await learning.curve_of(events)
            cost = {"model_calls": process.engine.calls, "sampled_tokens": await process.engine.sampled_tokens()}
        finally:
            await process.close()
    gain = bootstrap(
        [late - early for early, late in zip(before, after, strict=True)],
        confidence=CONFIDENCE, resamples=RESAMPLES, seed=0,
    )  # fmt: skip
    result = {
        "seed": seed,
        "sft_loss": round(loss, 4),
        "test_tasks": len(before),
        "before": round(sum(before) / len(before), 4),
        "after": round(sum(after) / len(after), 4),
        "gain": round(gain.mean, 4),
        "gain_low": round(gain.low, 4),
        "gain_high": round(gain.high, 4),
        "gained_tasks": sum(late > early for early, late in zip(before, after, strict=True)),
        "lost_tasks": sum(late < early for early, late in zip(before, after, strict=True)),
        "minutes": round((perf_counter() - began) / 60, 2),
        "cpu_minutes": round((process_time() - cpu_began) / 60, 2),
        **cost,
        "curve": curve,
    }
    say(f"{example}-{seed}: " + json.dumps({key: value for key, value in result.items() if key != "curve"}))
    return result


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", nargs="*", default=SEEDS, help=f"of {', '.join(SEEDS)}; all by default")
    parser.add_argument("--seeds", nargs="+", type=int, help="other than the three of the example")
    given = parser.parse_args()
    if unknown := set(given.example) - set(SEEDS):
        parser.error(f"no example with test tasks: {', '.join(sorted(unknown))}; there are {', '.join(SEEDS)}")
    torch.set_num_threads(1)
    for example in given.example:
        for seed in given.seeds or SEEDS[example]:
            learning.emit({"example": example, **asyncio.run(measured(example, seed))})


if __name__ == "__main__":
    main()
