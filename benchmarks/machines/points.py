"""The points of the scaling curve: how many engines and agents, and what the model of a deployment says of each.

An engine's speed is taken from runs with one engine alone. Everything the model says of two engines and more is computed
from that, before it is held against what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from benchmarks.routing.consumer import Training
from benchmarks.routing.load import Case
from benchmarks.routing.trace import ANSWER_TOKENS, PAUSE_S, TURNS
from benchmarks.scale.engines import EngineSpeed
from benchmarks.scale.model import Costs, Deployment, Prediction, predicted
from tests.support.llm_proxy.simulated_engine import BLOCK_TOKENS, Timings

ONE_GPU: Final = Timings()
# Llama 3.1 8B on two H100 that share each layer. In a prefill, 7 % of the time goes to the sums of layers (64 of 64 MB a step of
# 8,192 tokens, at 450 GB/s); in a step of decoding they take 64 times 15 us. The weights are there once, activations twice.
TWO_GPUS: Final = Timings(
    prefill_tokens_per_s=2 * 0.93 * ONE_GPU.prefill_tokens_per_s,
    weights_s=ONE_GPU.weights_s / 2,
    cached_token_s=ONE_GPU.cached_token_s / 2,
    step_s=ONE_GPU.step_s + 64 * 15e-6,
    blocks=58_000,
)
KINDS: Final[Mapping[str, tuple[Timings, Sequence[int]]]] = {
    "one GPU": (ONE_GPU, (4, 8, 16, 24, 32)),
    "two GPUs": (TWO_GPUS, (8, 16, 32, 56, 80)),
}
"""Engines, and the numbers of agents with which one alone is measured; all fit into its cache."""

CALLS: Final = sum(TURNS) / 2
TOKENS_OF_CALL: Final = sum(ANSWER_TOKENS) / 2
PAUSE: Final = sum(PAUSE_S) / 2
SWAP_S: Final = 1.0
BATCH: Final = 64
TRAINED_ENGINES: Final = 4
"""The trainer takes what so many engines give."""

FITS: Final = 32
"""Agents that an engine of one GPU has room for, with some to spare."""
FREE: Final = Costs(store_s=0.0, postgres_s=0.0, proxy_s=0.0, runner_s=0.0, session_s=0.0)
"""The clock stands still while services compute, so they cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many agents there are.

    Attributes:
        name: what the load is called in the results.
        of_engine: agents for each engine.
        in_all: agents however many engines there are.
        trains: whether a trainer takes the rollouts.
        engines: with how many engines it is measured.
    """

    name: str
    of_engine: int = 0
    in_all: int = 0
    trains: bool = False
    engines: Sequence[int] = (1, 2, 4, 8)

    def case(self, engines: int, training: Training | None) -> Case:
        """Returns what is run; where new weights come, a run is long enough for several versions."""
        agents = self.in_all + self.of_engine * engines
        case = Case(
            rule="sticky",
            agents=agents,
            by_turns=True,
            begun=min(agents, FITS * engines),
            engines=engines,
            warm_s=20.0,
            measured_s=90.0,
        )
        return replace(case, training=training, warm_s=60.0, measured_s=180.0) if self.trains else case


LOADS: Final = (
    Load(name="16 agents for each engine", of_engine=FITS // 2),
    Load(name="32 agents for each engine", of_engine=FITS, engines=range(1, 9)),
    Load(name="128 agents in all", in_all=4 * FITS),
    Load(name="32 agents for each engine, a trainer for four", of_engine=FITS, trains=True),
)


def alone(timings: Timings, agents: int) -> Case:
    """Returns the run of one engine alone, with so many agents."""
    return replace(Load(name="alone", in_all=agents).case(1, None), timings=timings, begun=agents)


def speed(timings: Timings, measured: Mapping[int, Mapping[str, float]]) -> EngineSpeed:
    """Fits an engine's speed to runs of one engine alone, by agents.

    By Little's law, a call takes the agents' cycle less their pause, and the calls that are in the engine are its share of it.
    """
    agents = np.array(list(measured), dtype=float)
    rates = np.array([one["calls_per_s"] for one in measured.values()])
    call_s = agents / rates - PAUSE
    beside_s, alone_s = np.polyfit(call_s * rates, call_s, 1)
    fullest = measured[max(measured)]
    conversation = fullest["mean_prompt_tokens"]
    return EngineSpeed(
        alone_s=round(float(alone_s), 4),
        beside_s=round(float(beside_s), 5),
        seats=int(timings.blocks * BLOCK_TOKENS / (conversation + TOKENS_OF_CALL)),
        swap_s=SWAP_S,
        recompute_s=round(conversation * fullest["hit_rate"] / timings.prefill_tokens_per_s, 4),
    )


def trainer(measured: Mapping[str, float]) -> Training:
    """Returns a trainer that takes what four engines give if nothing disturbs them, each as this one alone."""
    step_s = BATCH * CALLS / (TRAINED_ENGINES * measured["calls_per_s"])
    return Training(batch=BATCH, step_s=round(step_s - SWAP_S, 2), ahead_steps=4, swap_s=SWAP_S)


def told(case: Case, engine: EngineSpeed) -> Prediction:
    """Returns what the model says of a case."""
    training = case.training
    deployment = Deployment(
        runners=case.agents,
        slots=1,
        think_s=PAUSE * CALLS,
        calls=round(CALLS),
        engines=case.engines,
        engine=engine,
    )
    if training:
        deployment = replace(
            deployment,
            batch=training.batch,
            step_s=training.step_s + training.swap_s,
            ahead_steps=float(training.ahead_steps),
        )
    return predicted(deployment, FREE, seconds=600.0)


def row(engines: int, agents: int, measured: Mapping[str, float], prediction: Prediction) -> dict[str, Any]:
    """Returns what was measured at a point, what the model says, and how far it is off."""
    model_tokens = prediction.rollouts_per_s * CALLS * TOKENS_OF_CALL
    return {
        "engines": engines,
        "agents": agents,
        "measured": dict(measured),
        "model": {"rollouts_per_s": round(prediction.rollouts_per_s, 3), "tokens_per_s": round(model_tokens, 1)},
        "model_off_percent": round((model_tokens / measured["answer_tokens_per_s"] - 1) * 100, 1),
        "bound_by": prediction.bound_by,
    }
