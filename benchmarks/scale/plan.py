"""What a deployment on 128 GPUs carries: the model of this folder, with what was measured of each part.

Measured: CPU of a rollout in the store and in PostgreSQL (benchmarks/results/scale.json), and what simulated engines behind the whole proxy do
(benchmarks/results/machines_curve.json), of one GPU and of two, with the CPU of a call: of the proxy, its caller and the simulated
engine together, so it is more than the proxy's. Assumed: each H100 trains 8,200 tokens a second (40 % of its FLOPs, 6 per parameter and
token), a rollout's conversation is trained once and as a whole, new weights stop an engine for a second. Agents are those of the
curve. A deployment is simulated for ten minutes of its own time. Run `python -m benchmarks.scale.plan`; writes benchmarks/results/scale_plan.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from benchmarks import outcome
from benchmarks.machines.points import CALLS, FITS, PAUSE, TOKENS_OF_CALL
from benchmarks.routing.trace import SYSTEM_TOKENS, TASK_TOKENS, TOOL_TOKENS
from benchmarks.scale.engines import EngineSpeed
from benchmarks.scale.model import Costs, Deployment, Prediction, predicted
from fulmen_algorithm.policy.engine_settings import MAX_REPLICAS

SECONDS: Final = 600.0
GPUS: Final = 128
PARAMETERS: Final = 8.03e9
TRAINED_TOKENS_PER_S: Final = 0.4 * 989e12 / (6 * PARAMETERS)
"""Of one GPU."""
CONVERSATION_TOKENS: Final = SYSTEM_TOKENS + TASK_TOKENS + CALLS * (TOKENS_OF_CALL + sum(TOOL_TOKENS) / 2)
"""Of a rollout at its end."""
FULL: Final = 0.9
"""Share of the seats that attempts take."""
ROOMY: Final = {"store_replicas": 4, "postgres_cores": 8, "proxies": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How GPUs are used.

    Attributes:
        engines: engines of the policy.
        kind: `one GPU` or `two GPUs`, those of each engine.
        training: GPUs that train.
    """

    engines: int
    kind: str
    training: int

    @property
    def name(self) -> str:
        """What it is called in the results."""
        generating = self.engines * (2 if self.kind == "two GPUs" else 1)
        return f"{generating} + {self.training} GPUs: {self.engines} engines of {self.kind}"


BALANCED: Final = Split(engines=56, kind="one GPU", training=GPUS - 56)
SPLITS: Final = (
    Split(engines=48, kind="two GPUs", training=GPUS - 96),
    Split(engines=MAX_REPLICAS, kind="one GPU", training=GPUS - MAX_REPLICAS),
    Split(engines=28, kind="two GPUs", training=GPUS - 56),
    BALANCED,
)


def deployment(split: Split, speed: EngineSpeed, batch: int) -> Deployment:
    """Returns the deployment of a split, with attempts for nearly all seats."""
    trained_per_s = split.training * TRAINED_TOKENS_PER_S
    return Deployment(
        runners=round(split.engines * speed.seats * FULL),
        slots=1,
        think_s=PAUSE * CALLS,
        calls=round(CALLS),
        engines=split.engines,
        engine=speed,
        batch=batch,
        ahead_steps=4.0,
        step_s=batch * CONVERSATION_TOKENS / trained_per_s,
        **ROOMY,
    )


def variants(full: Deployment) -> dict[str, Deployment]:
    """Returns a deployment with each service cut down, to see what it is bound by."""
    return {
        "one store replica": replace(full, store_replicas=1),
        "four proxy processes": replace(full, proxies=4),
        "half of the engines": replace(full, engines=full.engines // 2),
        "a trainer of half the speed": replace(full, step_s=full.step_s * 2),
        "twice the attempts": replace(full, runners=full.runners * 2),
        "rollouts at most one step ahead": replace(full, ahead_steps=1.0),
    }


def row(name: str, deployment: Deployment, found: Prediction) -> str:
    """Returns a line of the table."""
    busy = ", ".join(f"{part} {share:.0%}" for part, share in found.busy.items())
    tokens = found.rollouts_per_s * CALLS * TOKENS_OF_CALL
    return (
        f"| {name} | {deployment.runners:,} | {found.rollouts_per_s:.1f} | {tokens:,.0f} | {busy}"
        f" | {found.empty_p99_s:,.1f} s | {found.bound_by} |\n"
    )


def traffic(found: Prediction, split: Split, deployment: Deployment) -> dict[str, float]:
    """Returns what goes over the network: versions to engines, and gradients between nodes of eight GPUs."""
    weights_gb = PARAMETERS * 2 / 1e9
    step_s = deployment.batch / found.rollouts_per_s
    nodes = split.training // 8
    return {
        "step_s": round(step_s, 1),
        "version_gb": round(weights_gb, 2),
        "versions_to_all_engines_gb": round(weights_gb * split.engines, 1),
        "versions_gbit_per_s": round(weights_gb * split.engines * 8 / step_s, 2),
        # A ring over copies, one on each node: each sends twice all but its own share of the float32 gradients.
        "gradients_of_node_gb": round(2 * (nodes - 1) / nodes * PARAMETERS * 4 / 1e9, 1),
    }


def main() -> None:
    """Simulates the cases and prints their table."""
    parser = argparse.ArgumentParser(description="Says what a large deployment carries.")
    parser.add_argument("--batch", type=int, default=1024, help="rollouts of a training step")
    arguments = parser.parse_args()
    measured = json.loads((outcome.FOLDER / "scale.json").read_text())["raw"]
    curve: dict[str, Any] = json.loads((outcome.FOLDER / "machines_curve.json").read_text())["raw"]
    call_s = curve["alone"]["one GPU"][str(FITS)]["cpu_ms_per_call"] / 1e3
    costs = replace(Costs.measured(measured), runner_s=0.0, proxy_s=call_s)
    speeds = {kind: EngineSpeed(**speed) for kind, speed in curve["speeds"].items()}
    raw: dict[str, object] = {"costs_s": {name: float(f"{value:.4g}") for name, value in asdict(costs).items()}}
    sys.stdout.write(
        "| deployment | attempts | rollouts/s | tokens/s | busy | an empty slot, 99 of 100 | bound by |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    cases = {split.name: deployment(split, speeds[split.kind], arguments.batch) for split in SPLITS}
    of_split = {split.name: split for split in SPLITS}
    for name, each in (cases | variants(cases[BALANCED.name])).items():
        found = predicted(each, costs, seconds=SECONDS)
        raw[name] = {
            "attempts": each.runners,
            "rollouts_per_s": round(found.rollouts_per_s, 1),
            "busy": {part: round(share, 3) for part, share in found.busy.items()},
            "empty_p99_ms": round(found.empty_p99_s * 1e3, 1),
            "bound_by": found.bound_by,
        } | (traffic(found, of_split[name], each) if name in of_split else {})
        sys.stdout.write(row(name, each, found))
    outcome.save("scale_plan", method=__doc__ or "", raw=raw, claims=[], folder=outcome.FOLDER)


if __name__ == "__main__":
    main()
