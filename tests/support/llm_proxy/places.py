"""Routes and calls for the tests of routing."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import key_of
from fulmen_llm_proxy.routing.table import Backend, Balancing, Route, RoutingTable, Target


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Keys:
    """An affinity with both keys given."""

    attempt: int
    prefix: int = 0


KEYS = [
    Keys(key_of(b"projects/default/rollouts/%d/attempts/1" % number), key_of(b"prompt %d" % number))
    for number in range(2000)
]


def of(backend_id: str, weight: int = 1, *, version: int = 0, policy: str = "") -> Target:
    return Target(backend_id=backend_id, model="m", weight=weight, policy_version=version, policy=policy)


def table(*targets: Target, balancing: Balancing = Balancing.STICKY, **backends: Backend) -> RoutingTable:
    known = {t.backend_id: Backend(id=t.backend_id, base_url="http://x/v1") for t in targets} | backends
    return RoutingTable(routes={"m": Route(model="m", targets=targets, balancing=balancing)}, backends=known)


def new_states(clock: Clock | None = None, *, recheck_s: float = 5) -> BackendStates:
    clock = clock or Clock()
    return BackendStates(recheck_s=recheck_s, clock=clock, wall_clock=clock)


def break_down(states: BackendStates, backend_id: str) -> None:
    """Lets calls fail until the breaker opens."""
    state = states.of(backend_id)
    for _ in range(3):
        state.failed(state.begin(), "connect")
