"""Trajectories: tokens are neither lost nor invented, and merging is decided by token ids alone."""

from __future__ import annotations

import json
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.agent import GRADER_AGENT
from fulmen.model_call import (
    ModelCallInvalid,
    pack_logprobs,
    pack_token_ids,
    unpack_logprobs,
    unpack_token_ids,
)
from fulmen.store.v1.span_pb2 import SpanChunk, SpanCodec, SpanRecord
from fulmen.trajectories import BreakReason, DropReason, trajectories, trajectory
from fulmen.trajectories.roles import MAX_CLIENTS, RESPONSE_ID_ATTRIBUTE
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.sdk.trajectory_cases import (
    ATTEMPT,
    attempts,
    attribute,
    chunk_of,
    plain,
    record_of,
    records_of,
    span_record,
)
from tests.support.sdk.trajectory_reference import PlainCall, PlainSpan, World, dropped_calls, reference_rows


@given(world=attempts(), order=st.randoms(use_true_random=False), compressed=st.booleans())
@settings(deadline=None)
def test_rows_and_drops_equal_the_naive_reference_whatever_the_order_of_spans_and_chunks(
    world: World, order: random.Random, compressed: bool
) -> None:
    records = records_of(*world)
    order.shuffle(records)
    middle = len(records) // 2
    chunks = [chunk_of(part, compressed=compressed) for part in (records[:middle], records[middle:]) if part]
    chunks += chunks[:1]  # A chunk may come twice.
    order.shuffle(chunks)
    result = trajectory(chunks)
    found = []
    for row in result.rows:
        tokens = [(token, False, 0.0, -1) for token in row.prompt_ids]
        tokens += zip(row.response_ids, row.loss_mask, row.logprobs, row.version_per_token(masked=-1), strict=True)
        found.append((row.agent_name, tokens))
    assert found == reference_rows(world)
    dropped = dropped_calls(world)
    expected = [reason for _, reason in sorted(dropped.items()) if reason != "lost"]
    assert [each.reason for each in result.dropped] == expected


@given(world=attempts())
@settings(deadline=None)
def test_every_sampled_token_of_a_kept_call_is_in_exactly_one_row(world: World) -> None:
    result = trajectory([chunk_of(records_of(*world))])
    recorded = [call for call in world[0] if not call.lost]
    assert sum(row.call_count for row in result.rows) + sum(result.drops.values()) == len(recorded)
    for row in result.rows:
        assert len(row.response_ids) == len(row.loss_mask) == len(row.logprobs)
        assert row.loss_mask[0]
        assert row.loss_mask[-1]
        assert all(p == 0.0 for p, sampled in zip(row.logprobs, row.loss_mask, strict=True) if not sampled)
        covered = [False] * len(row.response_ids)
        for each in row.calls:
            assert pack_token_ids(row.response_ids[each.start : each.end]) == each.call.completion
            assert pack_token_ids(row.prompt_ids + row.response_ids[: each.start]) == each.call.prompt
            covered[each.start : each.end] = [True] * (each.end - each.start)
        assert tuple(covered) == row.loss_mask
    assert sum(result.breaks.values()) <= max(0, len(result.rows) - 1)
    assert [row for name in result.agents for row in result.of_agent(name)] == sorted(
        result.rows, key=lambda row: result.agents.index(row.agent_name)
    )


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_are_packed_little_endian_and_read_back(ids: list[int]) -> None:
    packed = pack_token_ids(ids)
    assert packed == struct.pack(f"<{len(ids)}i", *ids)
    assert list(unpack_token_ids(packed)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_are_packed_little_endian_and_read_back(values: list[float]) -> None:
    packed = pack_logprobs(values)
    assert packed == struct.pack(f"<{len(values)}f", *values)
    assert list(unpack_logprobs(packed)) == values


def test_two_turns_merge_and_what_lies_between_is_masked() -> None:
    first = plain([1, 2], [3, 4])
    second = plain([1, 2, 3, 4, 9, 9], [5], version=2)
    [row] = trajectory([chunk_of([record_of(first, 0), record_of(second, 1)])]).rows
    assert row.prompt_ids == (1, 2)
    assert row.response_ids == (3, 4, 9, 9, 5)
    assert row.loss_mask == (True, True, False, False, True)
    assert row.logprobs == (-0.5, -1.0, 0.0, 0.0, -0.5)
    assert row.version_per_token(masked=-1) == (1, 1, -1, -1, 2)
    assert (row.temperature, row.policy, row.call_count) == (1.0, "p", 2)


def _talk(messages: list[dict[str, object]]) -> str:
    return json.dumps({"model": "m", "messages": messages})


USER = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "hi"}
MORE = {"role": "user", "content": "more"}


@pytest.mark.parametrize(
    ("second_prompt", "second_messages", "answer", "reason"),
    [
        ([1, 9, 3, 4, 5], [USER, SAID, MORE], SAID, BreakReason.TEMPLATE),
        ([1, 2, 7, 7, 7, 5], [USER, SAID, MORE], SAID, BreakReason.RETOKENISATION),
        ([1, 2, 3, 8, 5], [USER, SAID, MORE], SAID, BreakReason.TEMPLATE),
        ([1, 2, 7, 7, 7, 5], [USER, SAID, MORE], SAID | {"reasoning_content": "well"}, BreakReason.TEMPLATE),
        ([1, 2, 5], [USER, MORE], SAID, BreakReason.OTHER),
        ([6, 6], [MORE], SAID, BreakReason.OTHER),
    ],
)
def test_a_conversation_that_does_not_continue_by_token_says_why(
    second_prompt: list[int], second_messages: list[dict[str, object]], answer: dict[str, object], reason: BreakReason
) -> None:
    said = json.dumps({"choices": [{"message": answer}]})
    first = record_of(plain([1, 2], [3, 4], request=_talk([USER]), answer=said), 0)
    second = record_of(plain(second_prompt, [5], request=_talk(second_messages)), 1)
    result = trajectory([chunk_of([first, second])])
    assert len(result.rows) == 2
    assert result.breaks == {reason: 1}


def test_an_answer_that_the_client_never_saw_is_dropped() -> None:
    first = plain([1], [2], request="{}")
    again = plain([1], [3], request="{}", resend_count=1)
    result = trajectory([chunk_of([record_of(first, 0), record_of(again, 1)])])
    assert [row.response_ids for row in result.rows] == [(3,)]
    assert result.drops == {DropReason.ORPHANED: 1}


def kept_of(calls: list[PlainCall]) -> list[int]:
    """Returns the first sampled token of every row."""
    return [row.response_ids[0] for row in trajectory([chunk_of(records_of(calls, []))]).rows]


def test_a_resend_replaces_the_call_whose_client_went_away_before_any_other() -> None:
    again = plain([1], [4], request="{}", resend_count=1)
    gone = plain([1], [2], request="{}", gone=True)
    assert kept_of([gone, plain([1], [3], request="{}"), again]) == [3, 4]


def test_a_resend_of_a_call_that_came_to_nothing_replaces_no_other_sample() -> None:
    lost = plain([1], [], request="{}", lost=True)
    again = plain([1], [4], request="{}", resend_count=1)
    assert kept_of([plain([1], [2], request="{}"), lost, again]) == [2, 4]
    refused_twice = plain([1], [], request="{}", lost=True, resend_count=1)
    third = plain([1], [5], request="{}", resend_count=2)
    assert kept_of([plain([1], [2], request="{}"), refused_twice, third]) == [5]


def test_two_samples_that_were_both_sent_again_are_both_replaced() -> None:
    calls = [plain([1], [sampled], request="{}", resend_count=sampled // 4) for sampled in (2, 3, 4, 5)]
    assert kept_of(calls) == [4, 5]


def test_all_choices_of_an_answer_are_replaced_by_a_resend() -> None:
    first = [record_of(plain([1], [2 + i], request="{}"), i, start=0) for i in range(2)]
    again = [record_of(plain([1], [4 + i], request="{}", resend_count=1), 2 + i, start=1) for i in range(2)]
    for records in (first, again):
        span = Span.FromString(records[1].otlp_span)
        span.attributes.append(attribute("fulmen.choice", 1))
        records[1].otlp_span = span.SerializeToString()
    result = trajectory([chunk_of([*again, *first])])
    assert [row.response_ids for row in result.rows] == [(4,), (5,)]
    assert result.drops == {DropReason.ORPHANED: 2}


def test_a_branch_leaves_the_shared_answer_in_the_first_row() -> None:
    calls = [plain([1], [2]), plain([1, 2, 7], [3]), plain([1, 2, 8], [4]), plain([1, 2, 8, 4, 9], [5])]
    rows = trajectory([chunk_of(records_of(calls, []))]).rows
    assert [(row.prompt_ids, row.response_ids) for row in rows] == [((1,), (2, 7, 3)), ((1, 2, 8), (4, 9, 5))]


def test_a_call_continues_the_longest_row_that_it_begins_with() -> None:
    calls = [plain([1], [2]), plain([1], [2, 3]), plain([1, 2, 3, 4], [5])]
    rows = trajectory([chunk_of(records_of(calls, []))]).rows
    assert [row.response_ids for row in rows] == [(2,), (2, 3, 4, 5)]


def test_agents_are_named_by_their_nearest_span_and_never_share_a_row() -> None:
    spans = [
        PlainSpan(id=101, agent="planner"),
        PlainSpan(id=102, parent=101),
        PlainSpan(id=103, parent=102, agent="coder"),
    ]
    calls = [
        plain([1], [2], parent=102),
        plain([1, 2], [3], parent=103),
        plain([1, 2], [4], parent=102),
        plain([1, 2, 3], [5], parent=103, agent_name="given"),
    ]
    result = trajectory([chunk_of(records_of(calls, spans))])
    assert result.agents == ("planner", "coder", "given")
    assert [row.response_ids for row in result.of_agent("planner")] == [(2, 4)]


def test_spans_that_are_each_others_parents_name_nobody() -> None:
    spans = [PlainSpan(id=101, parent=102), PlainSpan(id=102, parent=101)]
    result = trajectory([chunk_of(records_of([plain([1], [2], parent=101)], spans))])
    assert result.agents == ("",)


def test_a_call_is_below_its_clients_span_unless_very_many_spans_name_its_answer() -> None:
    named = [attribute(RESPONSE_ID_ATTRIBUTE, "answer")]
    call = record_of(plain([1], [2]), 0, *named)
    for count, agent in ((MAX_CLIENTS, "planner"), (MAX_CLIENTS + 1, "")):
        spans = [span_record(PlainSpan(id=100 + number, agent="planner")) for number in range(count)]
        for record in spans:
            span = Span.FromString(record.otlp_span)
            span.attributes.extend(named)
            record.otlp_span = span.SerializeToString()
        assert trajectory([chunk_of([call, *spans])]).agents == (agent,)


def test_spans_that_all_name_one_answer_in_a_chain_without_end_hold_up_nobody() -> None:
    # 800,000,000 steps from each to the first.
    spans = [PlainSpan(id=100 + number, parent=99 + number) for number in range(40_000)]
    records = [span_record(span) for span in spans]
    for record in records:
        span = Span.FromString(record.otlp_span)
        span.attributes.append(attribute(RESPONSE_ID_ATTRIBUTE, "answer"))
        record.otlp_span = span.SerializeToString()
    calls = [
        record_of(plain([1], [2], parent=40_099), index, attribute(RESPONSE_ID_ATTRIBUTE, "answer"))
        for index in range(50)
    ]
    assert sum(row.call_count for row in trajectory([chunk_of([*records, *calls])]).rows) == 50


def test_graders_never_train_even_where_they_only_run_below_their_span() -> None:
    spans = [PlainSpan(id=101, agent=GRADER_AGENT)]
    calls = [plain([1], [2]), plain([5], [6], parent=101, usable=False), plain([1, 2], [3])]
    result = trajectory([chunk_of(records_of(calls, spans))])
    assert [row.response_ids for row in result.rows] == [(2, 3)]
    assert result.drops == {DropReason.GRADER: 1}


def test_a_break_is_explained_by_the_conversation_that_it_broke_whatever_came_between() -> None:
    answer = json.dumps({"choices": [{"index": 0, "message": SAID}]})
    first = plain([1, 2], [3, 4], request=_talk([USER]), answer=answer)
    between = plain([8], [8], request=_talk([MORE]), answer=answer)
    broken = plain([1, 2, 7, 7, 7, 5], [6], request=_talk([USER, SAID, MORE]), answer=answer)
    result = trajectory([chunk_of(records_of([first, between, broken], []))])
    assert result.breaks == {BreakReason.OTHER: 1, BreakReason.RETOKENISATION: 1}


def test_several_samples_of_one_prompt_all_stay() -> None:
    calls = [plain([1], [sampled], request="{}") for sampled in (2, 3, 4)]
    result = trajectory([chunk_of([record_of(call, index) for index, call in enumerate(calls)])])
    assert [row.response_ids for row in result.rows] == [(2,), (3,), (4,)]
    assert not result.drops


def test_the_chat_view_holds_the_whole_conversation() -> None:
    request = json.dumps({"messages": [USER], "tools": [{"type": "function"}]})
    answer = json.dumps({"choices": [{"message": SAID}]})
    [row] = trajectory([chunk_of([record_of(plain([1], [2], request=request, answer=answer), 0)])]).rows
    assert row.messages == (USER, SAID)
    assert row.tools == ({"type": "function"},)


def test_attempts_are_kept_apart() -> None:
    other = ATTEMPT.removesuffix("1") + "2"
    found = trajectories(
        [chunk_of([record_of(plain([1], [2]), 0)]), chunk_of([record_of(plain([1], [3]), 0)], attempt=other)]
    )
    assert {name: result.rows[0].response_ids for name, result in found.items()} == {ATTEMPT: (2,), other: (3,)}


def test_spans_that_are_no_model_calls_are_left_out() -> None:
    record = SpanRecord(otlp_span=Span(span_id=b"12345678").SerializeToString())
    result = trajectory([chunk_of([record])])
    assert (result.rows, dict(result.drops)) == ((), {})


def test_a_record_that_contradicts_itself_is_refused() -> None:
    record = record_of(plain([1], [2]), 0)
    call = ModelCallRecord.FromString(record.model_call)
    call.completion_logprobs = b""
    record.model_call = call.SerializeToString()
    with pytest.raises(ModelCallInvalid):
        trajectory([chunk_of([record])])


def test_a_chunk_that_cannot_be_decompressed_is_refused() -> None:
    chunk = SpanChunk(attempt=ATTEMPT, chunk_id="x", codec=SpanCodec.SPAN_CODEC_ZSTD, payload=b"nonsense")
    with pytest.raises(ModelCallInvalid, match="decompressed"):
        trajectory([chunk])
