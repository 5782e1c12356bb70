"""What rows that are split by positions save: activations that one micro-batch of a single row keeps for its backward pass.

Counted are the storages that torch saves for the backward pass, each once, without the weights, on the largest rank. The model
is small, of random weights; everything is on this machine, on CPUs, in float32.

    python -m benchmarks.context --tokens 8192 --ranks 1 2 4
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from fulmen_algorithm.training.compute import ComputeSettings, Ddp, OneProcess
from fulmen_algorithm.training.rows import row_from_completion
from fulmen_algorithm.training.settings import StepSettings
from tests.support.algorithm import context
from tests.support.algorithm.models import small_model
from tests.support.exchange.hook_ranks import RankPool

MIB = 2**20


def main() -> None:
    """Prints the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    options = parser.parse_args()
    half = options.tokens // 2
    row = row_from_completion(
        rollout_id="row",
        prompt_ids=[5, 6, 7, 8] * (half // 4),
        completion_ids=[5, 6, 7, 8] * (half // 4),
        logprobs=[0.0] * (half // 4 * 4),
        advantage=1.0,
        version=0,
    )
    pool = RankPool(max(options.ranks), context.__name__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = small_model(folder / "model", hidden=options.hidden, layers=options.layers)
        for checkpointing in (False, True):
            for ranks in options.ranks:
                parallel = Ddp(ranks=ranks, context=ranks) if ranks > 1 else OneProcess()
                compute = ComputeSettings(parallel=parallel, gradient_checkpointing=checkpointing)
                step = StepSettings(token_budget=options.tokens)
                work = context.Work(model_dir=model, rows=[row], compute=compute, step=step)
                meeting = folder / f"{ranks}-{checkpointing}"
                meeting.mkdir()
                kept = max(pool.run(meeting, ranks, context.kept_bytes, work))
                json.dump(
                    {"ranks": ranks, "checkpointing": checkpointing, "kept_mib": round(kept / MIB, 1)}, sys.stdout
                )
                print(flush=True)
    pool.close()


if __name__ == "__main__":
    main()
