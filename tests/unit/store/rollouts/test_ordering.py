"""The order of lists: what is written comes back, every mistake is told with its place, and no token breaks it."""

from __future__ import annotations

import contextlib
import json
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid, PageTokenInvalid
from fulmen_store.rollouts.filter import Field
from fulmen_store.rollouts.ordering import Place, SortKey, parse_order
from tests.support.store.filters import MOMENTS, orders

ROLLOUT = UUID("0192f0c1-7a6e-7c53-9f3e-0123456789ab")


def test_fields_are_read_in_order_with_their_directions() -> None:
    assert parse_order("") == parse_order("  ") == ()
    assert parse_order("reward desc, duration,end_time asc") == (
        SortKey(field=Field.REWARD, descending=True),
        SortKey(field=Field.DURATION),
        SortKey(field=Field.END_TIME),
    )


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("colour", [1]),
        ("state", [1]),
        ("reward down", [1]),
        ("reward desc asc", [1]),
        ("reward, reward desc", [9]),
        ("reward,", [8]),
        (",", [1, 2]),
        ("reward desc,  size, agent desc", [15, 21]),
        ("-reward", [1]),
    ],
)
def test_every_problem_is_told_with_its_place(text: str, positions: list[int]) -> None:
    with pytest.raises(ArgumentInvalid) as caught:
        parse_order(text)
    violations = caught.value.violations
    assert {violation.field for violation in violations} == {"order_by"}
    assert [int(violation.description.split()[2].rstrip(":")) for violation in violations] == positions, violations


@given(orders())
def test_an_order_survives_being_written_and_read(order: tuple[SortKey, ...]) -> None:
    assert parse_order(", ".join(f"{key.field}{' desc' * key.descending}" for key in order)) == order


@given(st.text(max_size=100))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(ArgumentInvalid):
        parse_order(text)


def test_a_place_survives_its_token_exactly() -> None:
    order = parse_order("reward, duration desc, end_time, cost_micros, prompt_token_count")
    place = Place(values=(0.1 + 0.2, 1e-300, MOMENTS[3], 2**63 - 1, None), rollout_id=ROLLOUT)
    assert Place.decode(place.encode(), order) == place


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999", "NaN"])
def test_a_forged_place_of_a_number_that_is_none_is_refused(number: str) -> None:
    with pytest.raises(PageTokenInvalid):
        Place.decode(f'["{ROLLOUT.hex}", {number}]'.encode(), parse_order("reward"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(order=orders(), content=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_content_of_a_token_breaks_it(order: tuple[SortKey, ...], content: bytes) -> None:
    with contextlib.suppress(PageTokenInvalid):
        Place.decode(content, order)


@given(order=orders(), values=st.lists(JSON, min_size=1, max_size=4))
def test_a_forged_place_holds_only_values_of_its_fields(order: tuple[SortKey, ...], values: list[object]) -> None:
    with contextlib.suppress(PageTokenInvalid):
        place = Place.decode(json.dumps([ROLLOUT.hex, *values]).encode(), order)
        assert Place.decode(place.encode(), order) == place
