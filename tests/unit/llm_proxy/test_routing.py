"""Which target a call gets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import BackendUnavailable, RouteNotFound
from fulmen_llm_proxy.domain.routing import Backend, Route, RoutingTable, Target

KEYS = [f"rollouts/{number}/attempts/1".encode() for number in range(2000)]


def always(_: str) -> bool:
    return True


def table(*targets: Target, draining: frozenset[str] = frozenset()) -> RoutingTable:
    backends = {
        name: Backend(id=name, base_url="http://x/v1", draining=name in draining) for name in ("a", "b", "c", "d")
    }
    return RoutingTable(routes={"m": Route(model="m", targets=targets)}, backends=backends)


def of(backend_id: str, weight: int = 1) -> Target:
    return Target(backend_id=backend_id, model="m", weight=weight)


def shares(routing: RoutingTable) -> Counter[str]:
    return Counter(routing.choose("m", key, always).backend.id for key in KEYS)


def test_an_attempt_stays_with_its_target() -> None:
    routing = table(of("a"), of("b"), of("c"))
    assert all(routing.choose("m", key, always) == routing.choose("m", key, always) for key in KEYS[:50])


def test_calls_are_shared_by_weight() -> None:
    counted = shares(table(of("a", 3), of("b", 1), of("c", 0)))
    assert counted["a"] == pytest.approx(1500, abs=100)
    assert counted["b"] == pytest.approx(500, abs=100)
    assert counted["c"] == 0


@given(st.sets(st.sampled_from("abcd"), min_size=2))
def test_a_target_that_goes_moves_only_its_own_attempts(names: set[str]) -> None:
    ordered = sorted(names)
    before, after = table(*map(of, ordered)), table(*map(of, ordered[1:]))
    for key in KEYS[:200]:
        held = before.choose("m", key, always).backend.id
        if held != ordered[0]:
            assert after.choose("m", key, always).backend.id == held


def test_an_only_target_needs_no_weight() -> None:
    assert shares(table(of("a", 0))) == {"a": len(KEYS)}


def test_unhealthy_targets_are_passed_over_until_none_is_left() -> None:
    routing = table(of("a"), of("b"))
    assert {routing.choose("m", key, lambda name: name == "b").backend.id for key in KEYS} == {"b"}
    assert {routing.choose("m", key, lambda _: False).backend.id for key in KEYS} == {"a", "b"}


def test_a_draining_backend_gets_no_call() -> None:
    assert shares(table(of("a"), of("b"), draining=frozenset("a"))) == {"b": len(KEYS)}
    with pytest.raises(BackendUnavailable):
        table(of("a"), draining=frozenset("a")).choose("m", b"k", always)


def test_an_unknown_model_names_those_that_are_served() -> None:
    with pytest.raises(RouteNotFound, match="Served models: m"):
        table(of("a")).choose("gone", b"k", always)
