"""The filter grammar: what is written comes back as a tree, and every mistake is told with its place."""

from __future__ import annotations

import contextlib
import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid
from fulmen_store.rollouts.filter import (
    ROLLOUTS,
    Comparison,
    Conjunction,
    Disjunction,
    Expression,
    Field,
    Negation,
    Operator,
    Presence,
    Search,
    creation_bounds,
    requires_state,
)
from fulmen_store.rollouts.filter_parser import MAX_FILTER_CHARS, parse_filter
from fulmen_store.rollouts.transitions import RolloutState
from tests.support.store.filters import expressions, written


def test_an_empty_filter_selects_everything() -> None:
    assert parse_filter("") is None
    assert parse_filter("  \n ") is None


def test_the_example_of_the_contract_is_read() -> None:
    assert parse_filter("state = FAILED AND failure_kind != TIMEOUT AND priority >= 10") == Conjunction(
        (
            Comparison(field=Field.STATE, operator=Operator.EQUAL, value=5),
            Comparison(field=Field.FAILURE_KIND, operator=Operator.NOT_EQUAL, value=2),
            Comparison(field=Field.PRIORITY, operator=Operator.GREATER_OR_EQUAL, value=10),
        )
    )


def test_or_binds_more_tightly_than_and() -> None:
    one, two, three = (Comparison(field=Field.MODE, operator=Operator.EQUAL, value=mode) for mode in (1, 2, 3))
    assert parse_filter("mode=TRAIN AND mode=VALIDATION OR mode=TEST") == Conjunction((one, Disjunction((two, three))))
    assert parse_filter("mode=TRAIN OR mode=VALIDATION AND mode=TEST") == Conjunction((Disjunction((one, two)), three))


def test_not_and_minus_negate_one_term() -> None:
    failed = Comparison(field=Field.STATE, operator=Operator.EQUAL, value=5)
    for text in (
        "NOT state = FAILED",
        "-state = FAILED",
        "NOT (state = FAILED)",
        "-(state=FAILED)",
        "NOT NOT -state=FAILED",
    ):
        assert parse_filter(text) == Negation(failed), text


def test_values_may_be_quoted_and_escaped() -> None:
    for text, value in (
        ("group_id = g-1.x/y", "g-1.x/y"),
        ('group_id = "a \\"b\\" \\\\ c"', 'a "b" \\ c'),
        ("group_id = 'AND ('", "AND ("),
        ('group_id = ""', ""),
        ("group_id = größe", "größe"),
    ):
        assert parse_filter(text) == Comparison(field=Field.GROUP_ID, operator=Operator.EQUAL, value=value), text


def test_the_value_of_a_key_of_a_map_is_compared() -> None:
    for text, key in (
        ("metadata.team = a", "team"),
        ("metadata.fulmen.retry_of = a", "fulmen.retry_of"),
        ("metadata.größe=a", "größe"),
        ("metadata.'a \\'b\\'' = a", "a 'b'"),
        ('metadata."=" = "a"', "="),
    ):
        read = parse_filter(text)
        assert read == Comparison(field=Field.METADATA, key=key, operator=Operator.EQUAL, value="a"), text
    for text, problems in (
        ("metadata = a", ["metadata is a map: compare the value of a key, metadata.KEY"]),
        ("metadata. = a", ["metadata is a map: compare the value of a key, metadata.KEY"]),
        ("required_labels.gpu < a", ["required_labels has no order: only = and != compare it"]),
        ("group_id.x = a", [f"`group_id.x` is not one of {ROLLOUTS.shown}"]),
    ):
        with pytest.raises(ArgumentInvalid) as refused:
            parse_filter(text)
        assert [each.description.partition(": ")[2] for each in refused.value.violations] == problems, text


def test_a_text_is_searched_and_a_star_asks_whether_a_field_is_set() -> None:
    for text in ('input:"a b"', 'input : "a b"', "input: 'a b'", 'input :"a b"'):
        assert parse_filter(text) == Search(field=Field.INPUT, text="a b"), text
    assert parse_filter("output:a:b") == Search(field=Field.OUTPUT, text="a:b")
    assert parse_filter('output:"*"') == Search(field=Field.OUTPUT, text="*")
    for text in ("reward:*", "reward : *", "reward:  *"):
        assert parse_filter(text) == Presence(field=Field.REWARD), text
    assert parse_filter("NOT output:*") == Negation(Presence(field=Field.OUTPUT))
    assert parse_filter("-metadata.team:*") == Negation(Presence(field=Field.METADATA, key="team"))
    assert parse_filter('metadata."a:b":*') == Presence(field=Field.METADATA, key="a:b")
    assert parse_filter("group_id = a:b") == Comparison(field=Field.GROUP_ID, operator=Operator.EQUAL, value="a:b")
    for text, problem in (
        ("input = x", "input is searched: write input:TEXT"),
        ("agent:x", "only * may follow agent: (whether it is set); of texts, input, output can be searched"),
        ('input:""', "only * may follow input: (whether it is set); of texts, input, output can be searched"),
        ("input:", "expected a value, found the end"),
        ("metadata:*", "metadata is a map: compare the value of a key, metadata.KEY"),
        (":x", "expected a field, found `:`"),
    ):
        with pytest.raises(ArgumentInvalid) as refused:
            parse_filter(text)
        assert [each.description.partition(": ")[2] for each in refused.value.violations] == [problem], text


def test_numbers_durations_and_beginnings_of_names_are_read() -> None:
    for text, value in (("-1", -1.0), ("+.5", 0.5), ("1.", 1.0), ("2e-3", 0.002), ('"0.25"', 0.25)):
        assert parse_filter(f"reward >= {text}") == Comparison(
            field=Field.REWARD, operator=Operator.GREATER_OR_EQUAL, value=value
        )
    assert parse_filter("duration < 1.5s") == Comparison(field=Field.DURATION, operator=Operator.LESS, value=1.5)
    assert parse_filter("cost_micros = 9223372036854775807") == Comparison(
        field=Field.COST_MICROS, operator=Operator.EQUAL, value=2**63 - 1
    )
    uuid = "0192f0c1-7a6e-7c53-9f3e-0123456789ab"
    for text, value in (("*", ""), ("0192f0c1-7*", "0192f0c1-7"), (uuid, uuid), (f"{uuid}*", uuid)):
        assert parse_filter(f'name = "projects/a/rollouts/{text}"') == Comparison(
            field=Field.NAME, operator=Operator.EQUAL, value=value
        )


def test_times_are_read_with_their_offset() -> None:
    moment = datetime.datetime(2026, 3, 14, 8, 15, 0, 250000, tzinfo=datetime.UTC)
    for text in ("2026-03-14T08:15:00.25Z", "2026-03-14T10:15:00.250+02:00", "2026-03-14t08:15:00.250000000z"):
        assert parse_filter(f'end_time < "{text}"') == Comparison(
            field=Field.END_TIME, operator=Operator.LESS, value=moment
        )


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("colour = red", [1]),
        ("state > FAILED", [7]),
        ("state = failed", [9]),
        ("priority = 1.5", [12]),
        ("priority = 99999999999999", [12]),
        ('create_time > "2026-13-01T00:00:00Z"', [15]),
        ("create_time > 2026-01-01T00:00:00Z", [15]),
        ("state = FAILED mode = TEST", [16]),
        ("state = FAILED AND", [19]),
        ("state =", [8]),
        ("state", [6]),
        ("= 3", [1]),
        ("(state = FAILED", [1]),
        ("state = FAILED)", [15]),
        ("group_id = 'open", [12]),
        ("state = WRONG AND colour = 1 OR priority = x", [9, 19, 44]),
        ("(state = WRONG", [1, 10]),
        ("AND", [1, 4]),
        ("state = FAILED ! mode = TEST", [16]),
        ("mode = TEST) AND colour = 1", [12, 18]),
        ("((" * 40, [33]),
        ("name = 0192", [8]),
        ("name = projects/a/rollouts/0192", [8]),
        ("name = projects/a/rollouts/0192f0c17*", [8]),
        ("name = projects/a/rollouts/0192F*", [8]),
        ("name < projects/a/rollouts/0192*", [6]),
        ("reward > high AND reward < 1e999 AND duration > 3 AND duration < s", [10, 28, 49, 66]),
        ("cost_micros > 1.5 AND prompt_token_count > 9223372036854775808", [15, 44]),
    ],
)
def test_every_problem_is_told_with_its_place(text: str, positions: list[int]) -> None:
    with pytest.raises(ArgumentInvalid) as caught:
        parse_filter(text)
    violations = caught.value.violations
    assert {violation.field for violation in violations} == {"filter"}
    assert [int(violation.description.split()[2].rstrip(":")) for violation in violations] == positions, violations


def test_a_filter_that_is_too_long_is_refused() -> None:
    with pytest.raises(ArgumentInvalid):
        parse_filter("x" * (MAX_FILTER_CHARS + 1))


@given(expressions())
def test_a_tree_survives_being_written_and_read(expression: Expression) -> None:
    text = written(expression)
    if len(text) <= MAX_FILTER_CHARS:
        assert parse_filter(text) == expression


@given(st.text(max_size=200) | st.text(alphabet="()=<>! '\"-ANDORNOTstate\\", max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(ArgumentInvalid):
        parse_filter(text)


def test_a_deep_filter_is_refused_and_not_followed() -> None:
    with pytest.raises(ArgumentInvalid):
        parse_filter("NOT (" * 400 + "state = FAILED" + ")" * 30)
    assert parse_filter("NOT " * 500 + "mode = TEST") == Comparison(field=Field.MODE, operator=Operator.EQUAL, value=3)


def test_only_what_must_hold_bounds_a_list() -> None:
    failed = RolloutState.FAILED
    assert requires_state(parse_filter("priority = 1 AND (state = FAILED AND mode = TEST)"), failed)
    assert not requires_state(parse_filter("state = FAILED OR priority = 1"), failed)
    assert not requires_state(parse_filter("NOT state = FAILED"), failed)
    assert not requires_state(None, failed)
    early, late = (datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in (1, 9))
    text = 'create_time >= "2026-01-01T00:00:00Z" AND create_time < "2026-01-09T00:00:00Z"'
    assert creation_bounds(parse_filter(text)) == (early, late)
    assert creation_bounds(parse_filter(f"({text}) OR mode = TEST")) == (None, None)
    assert creation_bounds(parse_filter(f"NOT ({text})")) == (None, None)
