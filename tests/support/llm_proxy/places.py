"""Routes and calls for the tests of routing."""

from __future__ import annotations

from dataclasses import dataclass

from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import Balancing, key_of
from fulmen_llm_proxy.routing.table import Backend, Route, RoutingTable, Target
from tests.support.clock import Clock


@dataclass(frozen=True)
class Keys:
    """An affinity with its keys given; of a call without an attempt, if it is not named."""

    attempt: int
    prefix: int = 0
    is_named: bool = False

    @property
    def conversation(self) -> int:
        """The attempt's."""
        return self.attempt


KEYS = [
    Keys(key_of(b"projects/default/rollouts/%d/attempts/1" % number), key_of(b"prompt %d" % number))
    for number in range(2000)
]


def of(backend_id: str, weight: int = 1, *, version: int = 0, policy: str = "") -> Target:
    return Target(backend_id=backend_id, model="m", weight=weight, policy_version=version, policy=policy)


def table(
    *targets: Target,
    balancing: Balancing = Balancing.STICKY,
    rolling_versions: bool = False,
    **backends: Backend,
) -> RoutingTable:
    known = {t.backend_id: Backend(id=t.backend_id, base_url="http://x/v1") for t in targets} | backends
    route = Route(model="m", targets=targets, balancing=balancing, rolling_versions=rolling_versions)
    return RoutingTable(routes={"m": route}, backends=known)


def new_states(clock: Clock | None = None, *, recheck_s: float = 5) -> BackendStates:
    clock = clock or Clock()
    return BackendStates(recheck_s=recheck_s, clock=clock, wall_clock=clock)


def break_down(states: BackendStates, backend_id: str) -> None:
    """Lets calls fail until the breaker opens."""
    state = states.of(backend_id)
    for _ in range(3):
        state.failed(state.begin(), "connect")
