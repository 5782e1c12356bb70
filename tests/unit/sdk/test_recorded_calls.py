"""Recorded calls become rows: one of each conversation, none twice, each prompt always on the same side."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.recorded_calls import RowKind, data_set
from fulmen.store.v1 import call_pb2


def call(conversation: str, *texts: str, answer: Any = "yes", **fields: Any) -> call_pb2.RecordedCall:
    """Returns a call with these messages, of user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    said = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer, "refusal": None}
    return call_pb2.RecordedCall(
        **{"conversation": conversation, "http_status": 200, "message_count": len(messages)} | fields,
        content=call_pb2.CallContent(
            messages_json=json.dumps(messages).encode(), answer_json=json.dumps(said).encode() if answer else b""
        ),
    )


def test_a_conversation_gives_its_longest_complete_call_with_the_answer() -> None:
    made = data_set(
        [
            call("a", "1", "2", "3", "4", "5", error="caller_gone"),
            call("a", "1", "2", "3"),
            call("a", "1", answer="2"),
            call("b", "x", answer="", http_status=500),
        ],
        RowKind.DEMONSTRATIONS,
        validation_share=0,
    )
    assert made.train == [
        {
            "messages": [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "3"},
                {"role": "assistant", "content": "yes"},
            ]
        }
    ]
    assert (made.calls, made.conversations, made.skipped) == (4, 2, {"without_a_complete_call": 1})


def test_what_is_said_in_another_conversation_gives_no_row() -> None:
    made = data_set(
        [call("a", "1"), call("b", "1"), call("c", "1", "yes", "3")], RowKind.DEMONSTRATIONS, validation_share=0
    )
    assert [len(row["messages"]) for row in made.train] == [4]
    assert made.skipped == {"said_in_another": 2}


def test_tasks_have_the_messages_as_input_and_the_text_as_answer() -> None:
    used = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "x"}}]}
    empty = {"role": "assistant", "content": None}
    calls = [call("a", "1"), call("b", "2", answer=used), call("c", "3", answer=empty)]
    made = data_set(calls, RowKind.TASKS, validation_share=0)
    assert made.train == [{"input": {"messages": [{"role": "user", "content": "1"}]}, "answer": "yes"}]
    assert made.skipped == {"without_a_text_as_answer": 1, "with_an_empty_answer": 1}


def test_roles_are_those_that_training_knows_and_what_is_no_message_is_left_out() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": "Hello"},
    ]
    one, other = call("a", "x"), call("b", "x")
    one.content.messages_json = json.dumps(items).encode()
    other.content.messages_json = json.dumps([{"role": "function", "content": "1"}]).encode()
    made = data_set([one, other], RowKind.DEMONSTRATIONS, validation_share=0)
    assert [message["role"] for message in made.train[0]["messages"]] == ["system", "user", "assistant"]
    assert made.skipped == {"with_messages_of_an_unknown_role": 1}


def test_a_row_that_training_would_refuse_for_its_length_is_left_out() -> None:
    made = data_set([call("a", "x" * 300_000), call("b", "x")], RowKind.DEMONSTRATIONS, validation_share=0)
    assert (len(made.train), made.skipped) == (1, {"longer_than_a_row_may_be": 1})


@given(st.lists(st.integers(0, 60), min_size=2, max_size=80), st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_the_same_prompt_is_on_one_side_however_often_it_is_asked(prompts: list[int], share: float) -> None:
    calls = [call(f"c{index}", f"{prompt}", answer=f"{index}") for index, prompt in enumerate(prompts)]
    made = data_set(calls, RowKind.TASKS, validation_share=share)
    train, validation = (
        {row["input"]["messages"][0]["content"] for row in rows} for rows in (made.train, made.validation)
    )
    assert not train & validation
    assert len(made.train) + len(made.validation) == len(prompts)
    assert made.train
    if not share or len(set(prompts)) == 1:
        assert not made.validation
    elif share <= 0.1 and len(set(prompts)) > 1:
        assert made.validation


@pytest.mark.parametrize("count", [2, 200])
def test_rows_that_are_added_later_move_no_other_from_side_to_side(count: int) -> None:
    calls = [call(f"c{number}", f"question {number}") for number in range(400)]
    before = data_set(calls[:200], RowKind.TASKS)
    after = data_set(calls[: 200 + count], RowKind.TASKS)
    assert all(row in after.train for row in before.train)
    assert all(row in after.validation for row in before.validation)
