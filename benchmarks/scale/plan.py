"""What 10,000 runners and 128 GPUs need of every service: the model of this folder, with what the load test has measured.

Method: CPU of a rollout by service is that of benchmarks/results/scale.json; a deployment is simulated for ten minutes of its own
time, with exponential times. What GPUs do is assumed: a policy of seven billion parameters on GPUs of 80 GB, of which 96
generate, each with 64 places of 40 tokens a second, and 32 train 320,000 tokens a second together. Change the assumptions by
flags. Run `python -m benchmarks.scale.plan`; writes benchmarks/results/scale_plan.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from benchmarks import outcome
from benchmarks.scale.model import Costs, Deployment, Prediction, predicted

SECONDS = 600.0
TOKENS_OF_ROLLOUT = 1024
ROOMY = {"store_replicas": 4, "postgres_cores": 8, "proxies": 16}


def deployments(arguments: argparse.Namespace) -> dict[str, Deployment]:
    """Returns the cases: all that is asked for, and each service cut down until it is what bounds the whole."""
    per_call = TOKENS_OF_ROLLOUT / arguments.calls
    full = Deployment(
        runners=arguments.runners,
        slots=1,
        think_s=arguments.think,
        calls=arguments.calls,
        generation_s=per_call / arguments.tokens_per_place,
        places=arguments.generating_gpus * arguments.places_per_gpu,
        batch=arguments.batch,
        ahead_steps=arguments.ahead,
        step_s=arguments.batch * TOKENS_OF_ROLLOUT / arguments.trained_tokens_per_s,
        **ROOMY,
    )
    return {
        f"{arguments.runners} runners, {arguments.generating_gpus} + {arguments.training_gpus} GPUs": full,
        "one store replica": replace(full, store_replicas=1),
        "one proxy process": replace(full, proxies=1),
        "half of the engines": replace(full, places=full.places // 2),
        "a trainer of half the speed": replace(full, step_s=full.step_s * 2),
        "twice the runners": replace(full, runners=full.runners * 2),
        "rollouts at most one step ahead": replace(full, ahead_steps=1.0),
    }


def row(name: str, deployment: Deployment, found: Prediction) -> str:
    """Returns a line of the table."""
    busy = ", ".join(f"{part} {share:.0%}" for part, share in found.busy.items())
    empty_ms = found.empty_p99_s * 1e3
    return f"| {name} | {found.rollouts_per_s:.0f} | {busy} | {empty_ms:,.0f} ms | {found.bound_by} |"


def main() -> None:
    """Simulates the cases and prints their table."""
    parser = argparse.ArgumentParser(description="Says what a large deployment needs.")
    parser.add_argument("--runners", type=int, default=10_000, help="attempts at once")
    parser.add_argument("--think", type=float, default=20.0, help="mean seconds of an attempt without its model calls")
    parser.add_argument("--calls", type=int, default=4, help="model calls of an attempt, 1,024 sampled tokens together")
    parser.add_argument("--generating-gpus", type=int, default=96)
    parser.add_argument("--training-gpus", type=int, default=32, help="only named: see --trained-tokens-per-s")
    parser.add_argument("--places-per-gpu", type=int, default=64, help="requests that a GPU generates at once")
    parser.add_argument("--tokens-per-place", type=float, default=40.0, help="tokens a second of one request")
    parser.add_argument("--trained-tokens-per-s", type=float, default=320_000.0, help="of all training GPUs together")
    parser.add_argument("--batch", type=int, default=4096, help="rollouts of a training step")
    parser.add_argument("--ahead", type=float, default=4.0, help="steps by which rollouts may be ahead of training")
    arguments = parser.parse_args()
    measured = json.loads((outcome.FOLDER / "scale.json").read_text())["raw"]
    costs = Costs.measured(measured)
    # A rollout of the load test calls the model once.
    costs = replace(costs, runner_s=0.0)
    raw: dict[str, object] = {"costs_s": {name: float(f"{value:.4g}") for name, value in asdict(costs).items()}}
    sys.stdout.write(
        "| deployment | rollouts/s | busy | an empty slot, 99 of 100 | bound by |\n|---|---|---|---|---|\n"
    )
    for name, deployment in deployments(arguments).items():
        found = predicted(deployment, costs, seconds=SECONDS)
        raw[name] = {
            "rollouts_per_s": round(found.rollouts_per_s, 1),
            "busy": {part: round(share, 3) for part, share in found.busy.items()},
            "empty_p99_ms": round(found.empty_p99_s * 1e3, 1),
            "bound_by": found.bound_by,
        }
        sys.stdout.write(row(name, deployment, found) + "\n")
    outcome.save("scale_plan", method=__doc__ or "", raw=raw, claims=[], folder=outcome.FOLDER)


if __name__ == "__main__":
    main()
