"""Rewards reach the calls that they score, or are named as unattached; credit follows its formulas."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.store.v1 import reward_pb2
from fulmen.store.v1.span_pb2 import SpanRecord
from fulmen.trajectories import (
    AttemptReward,
    CreditOption,
    CreditSettings,
    CreditSettingsInvalid,
    ScoredTrajectory,
    UnattachedReason,
    assign_credit,
    attach,
    read_rewards,
    trajectory,
)
from tests.support.sdk.trajectory_cases import (
    FIRST_SPAN,
    attempts,
    attribute,
    chunk_of,
    plain,
    record_of,
    records_of,
    span_id,
    span_record,
)
from tests.support.sdk.trajectory_reference import (
    PlainCall,
    PlainReward,
    PlainSpan,
    World,
    grouped,
    reference_credit,
    scored_calls,
)

TURNS = [plain([1], [2]), plain([1, 2, 9], [3, 3]), plain([1, 2, 9, 3, 3, 9], [4])]


def scored(calls: list[PlainCall], rewards: list[AttemptReward], spans: list[PlainSpan] = ()) -> ScoredTrajectory:
    """Builds and scores an attempt."""
    return attach(trajectory([chunk_of(records_of(calls, list(spans)))]), rewards)


def ranges_of(found: ScoredTrajectory) -> list[list[tuple[float, int, int]]]:
    """Returns value, start and end of every range, by row."""
    return [[(each.reward.value, each.start, each.end) for each in row.ranges] for row in found.rows]


def credits_of(found: ScoredTrajectory, option: str, **more: object) -> list[tuple[float | None, ...]]:
    """Returns the credit of every call, by row."""
    return [row.credits for row in assign_credit(found, CreditSettings(option=CreditOption(option), **more)).rows]


def test_rewards_of_calls_stay_ranges_of_their_tokens() -> None:
    rewards = [
        AttemptReward(value=1.0),
        AttemptReward(value=0.5, dimension="style"),
        AttemptReward(value=0.2, step=0),
        AttemptReward(value=0.3, span_id=span_id(2)),
    ]
    found = scored(TURNS, rewards)
    assert ranges_of(found) == [[(0.2, 0, 1), (0.3, 2, 4)]]
    assert found.rows[0].final == {"reward": 1.0, "style": 0.5}
    assert found.unattached == ()


def test_a_reward_of_a_span_scores_all_calls_within_it_at_any_depth() -> None:
    calls = [plain([1], [2], parent=FIRST_SPAN), plain([1, 2, 9], [3], parent=FIRST_SPAN + 1), plain([5], [6])]
    spans = [PlainSpan(id=FIRST_SPAN), PlainSpan(id=FIRST_SPAN + 1, parent=FIRST_SPAN)]
    found = scored(calls, [AttemptReward(value=1.0, span_id=span_id(FIRST_SPAN))], spans)
    assert ranges_of(found) == [[(1.0, 0, 1), (1.0, 2, 3)], []]


@pytest.mark.parametrize(("told", "parent"), [("a1", 0), ("a1", 999), ("other", 0)])
def test_a_call_whose_client_passed_no_span_on_is_below_the_span_of_the_same_answer(told: str, parent: int) -> None:
    answer_id = attribute("gen_ai.response.id", "a1")
    records = [record_of(plain([1], [2], parent=parent), 0, answer_id)]
    for span in (PlainSpan(id=FIRST_SPAN, agent="coder"), PlainSpan(id=FIRST_SPAN + 1, parent=FIRST_SPAN)):
        record = span_record(span)
        made = Span.FromString(record.otlp_span)
        made.attributes.append(attribute("gen_ai.response.id", told))
        records.append(SpanRecord(otlp_span=made.SerializeToString(), scope="agent"))
    rewards = [AttemptReward(value=float(depth), span_id=span_id(FIRST_SPAN + depth)) for depth in (0, 1)]
    found = attach(trajectory([chunk_of(records[::-1])]), rewards)
    same = told == "a1"
    assert found.trajectory.agents == ("coder" if same else "",)
    assert ranges_of(found) == [[(0.0, 0, 1), (1.0, 0, 1)] if same else []]


def test_the_span_that_a_client_passed_on_goes_before_that_of_the_same_answer() -> None:
    spans = [PlainSpan(id=FIRST_SPAN, agent="planner"), PlainSpan(id=FIRST_SPAN + 1, agent="below", parent=1)]
    records = [record_of(plain([1], [2], parent=FIRST_SPAN), 0, attribute("gen_ai.response.id", "a1"))]
    for span in spans:
        record = span_record(span)
        made = Span.FromString(record.otlp_span)
        made.attributes.append(attribute("gen_ai.response.id", "a1"))
        records.append(SpanRecord(otlp_span=made.SerializeToString(), scope="agent"))
    assert trajectory([chunk_of(records)]).agents == ("planner",)
    without = trajectory([chunk_of([records[0], records[2]])])
    assert without.agents == ("",)


def test_a_span_that_names_a_step_goes_before_counting() -> None:
    calls = [plain([1], [2], parent=FIRST_SPAN), plain([1, 2, 9], [3])]
    found = scored(calls, [AttemptReward(value=1.0, step=4)], [PlainSpan(id=FIRST_SPAN, step=4)])
    assert ranges_of(found) == [[(1.0, 0, 1)]]


def test_spans_of_rewards_that_name_the_step_that_they_score_name_no_calls() -> None:
    spans = [PlainSpan(id=FIRST_SPAN), PlainSpan(id=FIRST_SPAN + 1, parent=FIRST_SPAN, step=1)]
    calls = [plain([1], [2], parent=FIRST_SPAN), plain([1, 2], [3], parent=FIRST_SPAN)]
    found = scored(calls, [AttemptReward(value=1.0, step=1)], spans)
    assert ranges_of(found) == [[(1.0, 1, 2)]]


def test_steps_without_names_are_the_answers_that_the_agent_saw() -> None:
    calls = [
        plain([1], [2], request="{}"),
        plain([1], [3], request="{}", resend_count=1),
        plain([8], [8], agent_name="fulmen.grader"),
        plain([9], [9], usable=False),
        plain([1, 3], [4]),
    ]
    found = scored(calls, [AttemptReward(value=float(step), step=step) for step in range(4)])
    assert ranges_of(found) == [[(0.0, 0, 1), (2.0, 1, 2)]]
    assert [(each.reward.step, each.reason) for each in found.unattached] == [
        (1, UnattachedReason.DROPPED),
        (3, UnattachedReason.UNKNOWN_STEP),
    ]


def test_the_choices_of_one_answer_are_one_step_of_several_rows() -> None:
    calls = [plain([1], [2], request="{}"), plain([1], [3], request="{}"), plain([1, 3], [4])]
    records = [record_of(calls[0], 0, start=0), record_of(calls[1], 1, attribute("fulmen.choice", 1), start=0)]
    records.append(record_of(calls[2], 2))
    rewards = [AttemptReward(value=1.0, step=0), AttemptReward(value=2.0, step=1)]
    found = attach(trajectory([chunk_of(records)]), rewards)
    assert ranges_of(found) == [[(1.0, 0, 1)], [(1.0, 0, 1), (2.0, 1, 2)]]


def test_what_cannot_be_attached_is_named() -> None:
    calls = [plain([1], [2], gone=True), plain([1], [2])]
    rewards = [
        AttemptReward(value=1.0, span_id=span_id(1)),
        AttemptReward(value=1.0, span_id=span_id(77)),
        AttemptReward(value=1.0, span_id=span_id(FIRST_SPAN)),
        AttemptReward(value=1.0, step=1),
    ]
    found = scored(calls, rewards, [PlainSpan(id=FIRST_SPAN)])
    assert [each.reason for each in found.unattached] == ["dropped", "unknown_span", "no_call", "unknown_step"]
    nothing = scored([], [AttemptReward(value=1.0)])
    assert [each.reason for each in nothing.unattached] == ["no_rows"]


def test_rewards_are_read_as_the_store_has_them_and_the_last_of_a_kind_counts() -> None:
    messages = [
        reward_pb2.Reward(value=1.0),
        reward_pb2.Reward(value=2.0, dimension="reward"),
        reward_pb2.Reward(value=3.0, dimension="x", step=0),
        reward_pb2.Reward(value=4.0, span_id=span_id(1)),
    ]
    found = scored(TURNS, list(read_rewards(messages)))
    assert [each.value for each in found.rewards] == [2.0, 3.0, 4.0]
    assert found.rows[0].final == {"reward": 2.0}


SCORED_TURNS = [AttemptReward(value=8.0), AttemptReward(value=4.0, step=0), AttemptReward(value=2.0, step=1)]
TWO_ROWS = [*TURNS, plain([7], [7])]


@pytest.mark.parametrize(
    ("option", "more", "expected"),
    [
        ("final", {}, [(8.0, 8.0, 8.0), (8.0,)]),
        ("last_step", {}, [(0.0, 0.0, 0.0), (8.0,)]),
        ("per_step", {}, [(4.0, 2.0, 0.0), (8.0,)]),
        ("discounted", {"gamma": 0.5}, [(6.0, 4.0, 4.0), (8.0,)]),
        ("discounted", {"gamma": 1.0}, [(14.0, 10.0, 8.0), (8.0,)]),
        ("split", {}, [(4.0, 4.0, 4.0), (4.0,)]),
        ("final", {"weights": {"reward": 0.25}}, [(2.0, 2.0, 2.0), (2.0,)]),
    ],
)
def test_each_option_gives_what_its_formula_says(option: str, more: dict[str, object], expected: object) -> None:
    assert credits_of(scored(TWO_ROWS, SCORED_TURNS), option, **more) == expected


def test_a_reward_of_several_calls_counts_once_in_a_return() -> None:
    calls = [plain([1], [2], parent=FIRST_SPAN), plain([1, 2], [3], parent=FIRST_SPAN), plain([1, 2, 3], [4])]
    rewards = [AttemptReward(value=4.0, span_id=span_id(FIRST_SPAN))]
    found = scored(calls, rewards, [PlainSpan(id=FIRST_SPAN)])
    assert credits_of(found, "discounted", gamma=0.5) == [(2.0, 4.0, 0.0)]
    assert credits_of(found, "per_step") == [(4.0, 4.0, 0.0)]
    assert credits_of(found, "final") == [(None, None, None)]


def test_a_reward_of_interleaved_agents_counts_in_the_last_call_of_all() -> None:
    inside = {"parent": FIRST_SPAN}
    calls = [plain([1], [2], **inside), plain([5], [6], agent_name="critic", **inside), plain([1, 2], [3], **inside)]
    found = scored(calls, [AttemptReward(value=4.0, span_id=span_id(FIRST_SPAN))], [PlainSpan(id=FIRST_SPAN)])
    assert credits_of(found, "discounted", gamma=0.5) == [(1.0, 4.0), (2.0,)]


def test_credit_by_token_covers_what_was_sampled() -> None:
    settings = CreditSettings(option=CreditOption.PER_STEP)
    [row] = assign_credit(scored(TURNS, SCORED_TURNS), settings).rows
    assert row.per_token(masked=-1.0) == (4.0, -1.0, 2.0, 2.0, -1.0, 8.0)
    assert row.reward is None


def test_dimensions_that_do_not_count_or_are_not_there_are_named() -> None:
    rewards = [AttemptReward(value=1.0), AttemptReward(value=1.0, dimension="cost"), AttemptReward(value=3.0, step=0)]
    weighted = assign_credit(scored(TURNS, rewards), CreditSettings(weights={"cost": -1.0, "style": 2.0}))
    assert (weighted.missing, weighted.ignored) == (("style",), ("reward",))
    assert weighted.rows[0].reward == -1.0
    only = assign_credit(scored(TURNS, [AttemptReward(value=0.5, dimension="accuracy")]), CreditSettings())
    assert only.rows[0].reward == 0.5
    unclear = [AttemptReward(value=0.5, dimension="a"), AttemptReward(value=0.5, dimension="b")]
    assert assign_credit(scored(TURNS, unclear), CreditSettings()).rows[0].reward is None


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"option": "best"}, "option is 'best'"),
        ({"option": "discounted"}, "gamma is None"),
        ({"option": "discounted", "gamma": 1.5}, "gamma is 1.5"),
        ({"option": "discounted", "gamma": True}, "gamma is True"),
        ({"gamma": 0.9}, "only for the option discounted"),
        ({"weights": {}}, "no dimension"),
        ({"weights": {"a": float("nan")}}, "weight of a"),
        ({"weights": 3}, "not a table"),
        ({"discount": 0.9}, "unknown discount"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(table: dict[str, object], named: str) -> None:
    with pytest.raises(CreditSettingsInvalid, match=named):
        CreditSettings.parse(table)


def test_settings_are_read_from_a_table() -> None:
    table = {"option": "discounted", "gamma": 0.5, "weights": {"reward": 1}}
    expected = CreditSettings(option=CreditOption.DISCOUNTED, gamma=0.5, weights={"reward": 1})
    assert CreditSettings.parse(json.loads(json.dumps(table))) == expected


REWARDS = st.builds(
    PlainReward,
    value=st.integers(-8, 8).map(float),
    dimension=st.sampled_from(["reward", "style"]),
    step=st.one_of(st.none(), st.integers(0, 5)),
    span=st.sampled_from([0, 0, 1, 2, 3, 999, FIRST_SPAN, FIRST_SPAN + 1, 77]),
)


@given(
    world=attempts(),
    rewards=st.lists(REWARDS, max_size=5, unique_by=lambda each: (each.dimension, each.step, each.span)),
    option=st.sampled_from(list(CreditOption)),
    gamma=st.sampled_from([0.5, 1.0]),
    weights=st.sampled_from([{"reward": 1.0}, {"reward": 0.5, "style": -2.0}]),
)
@settings(deadline=None)
def test_attachment_and_credit_equal_the_naive_reference(
    world: World, rewards: list[PlainReward], option: CreditOption, gamma: float, weights: dict[str, float]
) -> None:
    given_rewards = {
        each: AttemptReward(
            value=each.value, dimension=each.dimension, step=each.step, span_id=span_id(each.span)
        )
        for each in rewards
    }  # fmt: skip
    found = scored(world[0], list(given_rewards.values()), world[1])
    expected_ranges, expected_reasons = set(), {}
    for each, reward in given_rewards.items():
        if each.step is None and not each.span:
            if not grouped(world):
                expected_reasons[reward] = "no_rows"
            continue
        places = scored_calls(world, each)
        if isinstance(places, str):
            expected_reasons[reward] = places
        else:
            expected_ranges |= {(reward, span_id(place + 1)) for place in places}
    attached = {(each.reward, row.row.calls[each.call].call.span_id) for row in found.rows for each in row.ranges}
    assert attached == expected_ranges
    assert {each.reward: each.reason for each in found.unattached} == expected_reasons

    use = CreditSettings(
        option=option, gamma=gamma if option is CreditOption.DISCOUNTED else None, weights=weights
    )  # fmt: skip
    credit = {
        int.from_bytes(each.call.span_id) - 1: value
        for row in assign_credit(found, use).rows
        for each, value in zip(row.scored.row.calls, row.credits, strict=True)
    }
    assert credit == pytest.approx(reference_credit(world, rewards, option, gamma, weights))
