"""Which replica of a variant a call gets."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import (
    LOAD_FACTOR,
    Balancing,
    CallAffinity,
    Replica,
    pick,
    prompt_beginning,
    seed_of,
)
from tests.support.clock import Clock
from tests.support.llm_proxy.places import KEYS, Keys, break_down, new_states

ALL = list(Balancing)


def replicas(*weights: int, most: int = 1024) -> list[Replica]:
    return [
        Replica(index=i, backend_id=name, weight=weight, seed=seed_of(name), max_in_flight=most)
        for i, (name, weight) in enumerate(zip("abcdefgh", weights, strict=False))
    ]


def chosen(held: list[Replica], states: BackendStates, key: Keys = KEYS[0], how: Balancing = Balancing.STICKY) -> str:
    return pick(held, states=states, affinity=key, balancing=how).backend_id


weights_and_calls = st.tuples(
    st.lists(st.integers(1, 20), min_size=2, max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=120),
)


@given(weights_and_calls)
def test_no_replica_carries_more_than_its_bound(case: tuple[list[int], list[tuple[int, bool]]]) -> None:
    weights, calls = case
    held, states = replicas(*weights), new_states()
    for number, ends in calls:
        total = sum(states.of(one.backend_id).load for one in held) + 1
        taken = pick(held, states=states, affinity=KEYS[number], balancing=Balancing.STICKY)
        state = states.of(taken.backend_id)
        assert state.try_acquire(10_000)
        assert state.load <= math.ceil(LOAD_FACTOR * total * taken.weight / sum(weights))
        if ends:
            state.release()


def test_keys_of_one_place_spill_over_to_the_same_next_one() -> None:
    held, states = replicas(1, 1, 1, 1), new_states()
    order = []
    for _ in range(8):
        name = chosen(held, states)
        states.of(name).try_acquire(1024)
        order.append(name)
    again = new_states()
    for name in order:
        assert chosen(held, again) == name
        again.of(name).try_acquire(1024)
    assert len(set(order)) > 1


def test_calls_are_spread_by_prefix_whoever_makes_them() -> None:
    held, states = replicas(1, 1, 1, 1), new_states()
    siblings = [Keys(attempt=key.attempt, prefix=7) for key in KEYS[:50]]
    assert len({chosen(held, states, key, Balancing.PREFIX_CACHE) for key in siblings}) == 1
    assert len({chosen(held, states, key, Balancing.STICKY) for key in siblings}) == 4


def test_the_fewest_requests_under_way_by_weight_win() -> None:
    held, states = replicas(1, 3, 1), new_states()
    for name, calls in (("a", 1), ("b", 4), ("c", 2)):
        for _ in range(calls):
            states.of(name).try_acquire(1024)
    assert chosen(held, states, how=Balancing.LEAST_OUTSTANDING) == "b"
    even = replicas(1, 1, 1)
    assert len({chosen(even, new_states(), key, Balancing.LEAST_OUTSTANDING) for key in KEYS[:50]}) == 3


@pytest.mark.parametrize("how", ALL)
def test_a_full_replica_is_passed_over_while_another_has_room(how: Balancing) -> None:
    held, states = replicas(1, 1, most=2), new_states()
    states.of("a").load, states.of("b").load = 2, 1
    assert {chosen(held, states, key, how) for key in KEYS[:20]} == {"b"}


@pytest.mark.parametrize("how", ALL)
def test_a_saturated_engine_is_left_until_all_are(how: Balancing) -> None:
    held, states = replicas(1, 1), new_states()
    states.of("a").set_engine_load(16, 0.1)
    assert {chosen(held, states, key, how) for key in KEYS[:20]} == {"b"}
    states.of("b").set_engine_load(0, 0.99)
    assert {chosen(held, states, key, how) for key in KEYS[:20]} == {"a", "b"}


@pytest.mark.parametrize("how", ALL)
def test_open_breakers_are_respected_up_to_half_of_the_replicas(how: Balancing) -> None:
    held, states = replicas(1, 1, 1, 1), new_states()
    for broken, left in (("a", {"b", "c", "d"}), ("b", {"c", "d"}), ("c", {"a", "b", "c", "d"})):
        break_down(states, broken)
        assert {chosen(held, states, key, how) for key in KEYS[:60]} == left


def test_the_last_backend_of_a_variant_is_never_ejected() -> None:
    states = new_states()
    break_down(states, "a")
    assert chosen(replicas(1), states) == "a"
    break_down(states, "b")
    assert {chosen(replicas(1, 1), states, key) for key in KEYS[:20]} == {"a", "b"}


def test_a_held_replica_is_passed_over_while_another_is_not_held() -> None:
    clock = Clock()
    states = new_states(clock)
    a, b = replicas(1, 1)
    held = [replace(a, hold_until_s=clock.now_s + 5), b]
    assert {chosen(held, states, key) for key in KEYS[:20]} == {"b"}
    clock.now_s += 5
    assert {chosen(held, states, key) for key in KEYS[:20]} == {"a", "b"}


def test_replicas_to_avoid_are_avoided_while_there_are_others() -> None:
    held, states = replicas(1, 1, 1), new_states()
    for key in KEYS[:20]:
        taken = pick(held, states=states, affinity=key, balancing=Balancing.STICKY, avoid={"a", "b"})
        assert taken.backend_id == "c"
    assert pick(held, states=states, affinity=KEYS[0], balancing=Balancing.STICKY, avoid={"a", "b", "c"})


texts = st.text(max_size=60)
messages = st.lists(st.fixed_dictionaries({"content": texts, "role": st.sampled_from(["system", "user"])}), min_size=2)


@given(messages, messages, st.booleans())
def test_a_conversation_that_goes_on_keeps_its_beginning(
    begun: list[dict[str, str]], more: list[dict[str, str]], role_first: bool
) -> None:
    def fields(held: list[dict[str, str]]) -> dict[str, msgspec.Raw]:
        ordered = [dict(sorted(one.items(), reverse=role_first)) for one in held]
        return {"messages": msgspec.Raw(msgspec.json.encode(ordered))}

    if not role_first:
        more = [{"content": one["content"].replace("}", ""), "role": one["role"]} for one in more]
    assert prompt_beginning(fields(begun[:2])) == prompt_beginning(fields([*begun[:2], *more]))


def test_other_beginnings_have_other_keys() -> None:
    def prefix(**fields: object) -> int:
        return CallAffinity(
            None, {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
        ).prefix

    task = [{"role": "system", "content": "You add." * 1000}, {"role": "user", "content": "1 + 1"}]
    other = [task[0], {"role": "user", "content": "2 + 2"}]
    keys = [
        prefix(messages=task),
        prefix(messages=other),
        prefix(messages=task, system="Be brief."),
        prefix(prompt="1 + 1"),
        prefix(prompt="2 + 2"),
        prefix(input=[1, 2, 3]),
    ]
    assert len(set(keys)) == len(keys)


def conversation(**fields: object) -> int:
    return CallAffinity(
        None, {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    ).conversation


def test_a_conversation_is_bound_from_its_first_call_on_in_whatever_form_it_is_sent_again() -> None:
    first = {"role": "user", "content": "2 + 2?"}
    system = {"role": "system", "content": "You add."}
    more = [{"role": "assistant", "content": "4}"}, {"role": "user", "content": "And 3?"}]
    sorted_keys = [dict(sorted(each.items())) for each in (first, *more)]
    marked = {"role": "user", "content": [{"type": "text", "text": "2 + 2?", "cache_control": {"type": "ephemeral"}}]}
    began = conversation(messages=[first])
    assert began == conversation(messages=[first, *more]) == conversation(messages=sorted_keys)
    assert began == conversation(messages=[marked, *more])
    assert conversation(messages=[system, first]) == conversation(messages=[system, first, *more])
    assert conversation(system="You add.", messages=[first]) == conversation(
        system=[{"type": "text", "text": "You add."}], messages=[first, *more]
    )
    assert conversation(input=[first]) == conversation(input=[first, *more])


def test_other_conversations_and_those_of_other_users_are_bound_apart() -> None:
    first, other = {"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}
    system = {"role": "system", "content": "You add."}
    keys = [
        conversation(messages=[first]),
        conversation(messages=[other]),
        conversation(messages=[system, first]),
        conversation(messages=[first], user="ann"),
        conversation(messages=[first], user="bob"),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "body", [{"prompt": "x"}, {"input": "x"}, {"input": [1, 2]}, {"messages": []}, {"messages": [1]}, {}]
)
def test_calls_without_messages_are_spread(body: dict[str, object]) -> None:
    assert len({conversation(**body) for _ in range(10)}) == 10


def test_an_attempt_or_a_named_conversation_binds_whatever_is_said() -> None:
    said = {"messages": msgspec.Raw(b'[{"role":"user","content":"hi"}]')}
    assert CallAffinity("a", said).conversation == CallAffinity("a", {}).conversation


def test_calls_of_nobody_are_spread_and_those_of_an_attempt_are_not() -> None:
    assert CallAffinity("a", {}).attempt == CallAffinity("a", {}).attempt
    nobody = CallAffinity(None, {})
    assert nobody.attempt == nobody.attempt
    assert len({CallAffinity(None, {}).attempt for _ in range(10)}) == 10
