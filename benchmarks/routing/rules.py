"""How the engine of a call is chosen: by the proxy, or by a rule of comparison that names the engine's own route."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import Replica, key_of, rendezvous, seed_of, within_bound
from tests.support.llm_proxy.simulated_engine import BLOCK_TOKENS, BYTES_PER_TOKEN, SimulatedEngine, block_ids

ALL = "policy"
"""The model that all engines serve."""

_CALL_S = 0.01
"""What the oracle takes another call at an engine to cost, seconds: about one decoding step."""


def route_of(engine: int) -> str:
    """Returns the model that one engine serves alone."""
    return f"engine-{engine}"


class Rule(Protocol):
    """Chooses where a call goes."""

    def begin(self, attempt: str, prompt: bytes) -> str:
        """Returns the model to call."""

    def end(self, model: str) -> None:
        """Notes the end of a call."""


class ByProxy:
    """The proxy chooses."""

    def begin(self, attempt: str, prompt: bytes) -> str:
        """Returns the model of all engines."""
        return ALL

    def end(self, model: str) -> None:
        """Does nothing."""


class RoundRobin(ByProxy):
    """Each engine in turn."""

    def __init__(self, engines: int) -> None:
        self._models = cycle([route_of(engine) for engine in range(engines)])

    def begin(self, attempt: str, prompt: bytes) -> str:
        """Returns the next engine's model."""
        return next(self._models)


class AttemptHash:
    """Rendezvous hashing of attempts with bounded loads: no memory of where an attempt was before."""

    def __init__(self, engines: int) -> None:
        self._states = BackendStates(recheck_s=1.0, clock=float, wall_clock=float)
        self._replicas = [
            Replica(index=i, backend_id=route_of(i), weight=1, seed=seed_of(route_of(i)), max_in_flight=4000)
            for i in range(engines)
        ]

    def begin(self, attempt: str, prompt: bytes) -> str:
        """Returns the model of the best score among those within the bound."""
        candidates = [(replica, self._states.of(replica.backend_id)) for replica in self._replicas]
        chosen = rendezvous(within_bound(candidates), key_of(attempt.encode())).backend_id
        self._states.of(chosen).load += 1
        return chosen

    def end(self, model: str) -> None:
        """Takes the call off the engine's load."""
        self._states.of(model).load -= 1


class Oracle(ByProxy):
    """Knows what every engine has cached and what it is to do: takes the one that computes the prompt soonest."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = engines

    def begin(self, attempt: str, prompt: bytes) -> str:
        """Returns the model of the cheapest engine."""
        ids = block_ids(prompt)
        tokens = len(prompt) // BYTES_PER_TOKEN
        costs = [self._cost_s(engine, ids, tokens) for engine in self._engines]
        return route_of(costs.index(min(costs)))

    def _cost_s(self, engine: SimulatedEngine, ids: list[int], tokens: int) -> float:
        """Returns best hit minus load, as time: what is to be computed first, and how many decode beside it."""
        hit = engine.cache.hit_blocks(ids) * BLOCK_TOKENS
        calls = len(engine.running) + len(engine.waiting)
        to_compute = tokens - hit + engine.tokens_to_compute()
        return to_compute / engine.timings.prefill_tokens_per_s + calls * _CALL_S
