"""Which target a call gets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import BackendUnavailable, RouteNotFound
from fulmen_llm_proxy.routing.table import Backend, RoutingTable
from tests.support.llm_proxy.places import KEYS, Keys, break_down, new_states, of, table

CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27}
"""Quantiles of 0.999, by degrees of freedom."""


def shares(routing: RoutingTable) -> Counter[str]:
    states = new_states()
    return Counter(routing.choose("m", key, states).backend.id for key in KEYS)


def chi_square(counted: Counter[str], weights: dict[str, int]) -> float:
    total, all_weights = sum(counted.values()), sum(weights.values())
    expected = {name: total * weight / all_weights for name, weight in weights.items()}
    return sum((counted[name] - due) ** 2 / due for name, due in expected.items())


@pytest.mark.parametrize("apart", [False, True], ids=["replicas", "variants"])
@pytest.mark.parametrize("weights", [{"a": 3, "b": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 90, "b": 5, "c": 4, "d": 1}])
def test_calls_are_shared_by_weight(weights: dict[str, int], apart: bool) -> None:
    targets = [of(name, weight, version=place * apart) for place, (name, weight) in enumerate(weights.items())]
    counted = shares(table(*targets, of("nothing", 0)))
    assert counted["nothing"] == 0
    assert chi_square(counted, weights) < CHI_SQUARE_999[len(weights) - 1]


def test_an_attempt_stays_with_its_target() -> None:
    routing, states = table(of("a"), of("b"), of("c", version=2)), new_states()
    for key in KEYS[:50]:
        assert routing.choose("m", key, states) == routing.choose("m", key, states)


@given(st.sets(st.sampled_from("abcdefg"), min_size=2), st.booleans())
def test_a_target_that_goes_or_comes_moves_only_its_own_attempts(names: set[str], apart: bool) -> None:
    ordered = sorted(names)
    targets = [of(name, version=ord(name) * apart) for name in ordered]
    before, after, states = table(*targets), table(*targets[1:]), new_states()
    for key in KEYS[:100]:
        held = before.choose("m", key, states).backend.id
        if held != ordered[0]:
            assert after.choose("m", key, states).backend.id == held


def test_engines_that_take_a_version_one_after_the_other_stand_in_for_each_other_and_keep_their_attempts() -> None:
    routes = [table(of("a", version=one), of("b", version=two), rolling_versions=True) for one, two in [(1, 1), (2, 1)]]
    before, during, states = *routes, new_states()
    choices = [(before.choose("m", key, states), during.choose("m", key, states)) for key in KEYS[:100]]
    assert all(old.backend == new.backend for old, new in choices)
    assert {(new.backend.id, new.target.policy_version) for _, new in choices} == {("a", 2), ("b", 1)}
    break_down(states, "a")
    assert {during.choose("m", key, states).backend.id for key in KEYS[:100]} == {"b"}


def test_an_attempt_stays_with_its_variant_whatever_becomes_of_its_replicas() -> None:
    routing = table(of("a", version=1), of("b", version=2), of("c", version=2))
    well, ill = new_states(), new_states()
    for name in ("a", "b"):
        break_down(ill, name)
    for key in KEYS[:200]:
        before, after = routing.choose("m", key, well), routing.choose("m", key, ill)
        assert after.target.policy_version == before.target.policy_version
        assert after.backend.id in {1: "a", 2: "c"}[after.target.policy_version]


def test_the_policy_is_part_of_the_variant() -> None:
    routing = table(of("a", policy="one"), of("b", policy="two"))
    assert {len(routing.choose("m", key, new_states()).variant.replicas) for key in KEYS[:20]} == {1}


def test_an_only_target_needs_no_weight_and_asks_for_no_key() -> None:
    class Unasked:
        @property
        def attempt(self) -> int:
            raise AssertionError

        prefix = attempt

    assert table(of("a", 0)).choose("m", Unasked(), new_states()).backend.id == "a"


def test_a_backend_that_is_named_twice_has_both_weights() -> None:
    counted = shares(table(of("a", 1), of("b", 1), of("a", 2)))
    assert chi_square(counted, {"a": 3, "b": 1}) < CHI_SQUARE_999[1]


def test_a_draining_backend_gets_no_call() -> None:
    draining = Backend(id="a", base_url="http://x/v1", draining=True)
    assert shares(table(of("a"), of("b"), a=draining)) == {"b": len(KEYS)}
    with pytest.raises(BackendUnavailable):
        table(of("a"), a=draining).choose("m", Keys(1), new_states())


def test_an_unknown_model_names_those_that_the_caller_may_use() -> None:
    routing = table(of("a"))
    with pytest.raises(RouteNotFound, match="Served models: m"):
        routing.route("gone", "projects/any")
    with pytest.raises(RouteNotFound) as refused:
        routing.choose("gone", Keys(1), new_states())  # a fallback that has just been deleted
    assert "'m'" not in str(refused.value)
    assert "Served" not in str(refused.value)
