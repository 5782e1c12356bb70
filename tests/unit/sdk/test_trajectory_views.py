"""Views: triplets, conversations and files say what was recorded, whichever API it was made by, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen import row_files
from fulmen.model_call import pack_logprobs, pack_token_ids
from fulmen.row_files import writing_jsonl, writing_parquet
from fulmen.store.v1.span_pb2 import SpanRecord
from fulmen.trajectories import (
    AttemptReward,
    Conversation,
    CreditOption,
    CreditSettings,
    assign_credit,
    attach,
    conversations,
    trajectory,
    transcript,
    triplets,
)
from fulmen.trajectories.export import COLUMNS, View, records
from tests.support.sdk.trajectory_cases import ATTEMPT, attempts, attribute, chunk_of, plain, record_of, records_of
from tests.support.sdk.trajectory_reference import PlainCall, World, dropped_calls

USER = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "hi"}
MORE = {"role": "user", "content": "more"}
DONE = {"role": "assistant", "content": "done"}


def talk(before: list[Any], answer: Any, *, place: int = 0, **more: object) -> PlainCall:
    """Makes a call of the chat API."""
    texts = {"request": json.dumps({"messages": before}), "answer": _choices(answer)}
    return plain([10 + place, *range(len(before))], [place], **texts, **more)


def _choices(*answers: Any) -> str:
    return json.dumps({"choices": [{"index": index, "message": each} for index, each in enumerate(answers)]})


def conversations_of(*calls: PlainCall) -> tuple[Conversation, ...]:
    """Returns the conversations of an attempt."""
    return conversations(trajectory([chunk_of(records_of(list(calls), []))]))


def said_in(request: Any, answer: Any) -> Conversation:
    """Returns the one conversation of a call that was recorded so."""
    call = plain([1], [2], request=json.dumps(request), answer=json.dumps(answer))
    [found] = conversations_of(call)
    return found


def test_only_the_longest_conversations_stay() -> None:
    found = conversations_of(
        talk([USER], SAID), talk([USER, SAID, MORE], DONE, place=1), talk([USER, SAID, USER], SAID, place=2)
    )
    assert [each.messages for each in found] == [(USER, SAID, MORE, DONE), (USER, SAID, USER, SAID)]


def test_an_answer_repeated_without_its_reasoning_is_the_same_conversation() -> None:
    thought = {**SAID, "reasoning_content": "hm", "tool_calls": None}
    found = conversations_of(talk([USER], thought), talk([USER, SAID, MORE], DONE, place=1))
    assert [each.messages for each in found] == [(USER, SAID, MORE, DONE)]


def test_conversations_of_agents_are_their_own_and_graders_have_none() -> None:
    found = conversations_of(
        talk([USER], SAID, agent_name="critic"),
        talk([USER, SAID, MORE], DONE, place=1),
        talk([MORE], SAID, place=2, agent_name="fulmen.grader"),
    )
    assert [(each.agent_name, len(each.messages)) for each in found] == [("critic", 2), ("", 4)]


def test_texts_of_answers_whose_tokens_are_missing_stay_and_say_so() -> None:
    found = conversations_of(talk([USER], SAID, usable=False), talk([MORE], DONE, place=1, usable=False, gone=True))
    assert [(each.messages, each.is_trainable) for each in found] == [((USER, SAID), False)]


def test_each_choice_of_an_answer_has_its_own_text() -> None:
    calls = [plain([1], [2 + i], request=json.dumps({"messages": [USER]}), answer=_choices(SAID, DONE)) for i in (0, 1)]
    chunk = chunk_of([record_of(calls[0], 0, start=0), record_of(calls[1], 1, attribute("fulmen.choice", 1), start=0)])
    found = trajectory([chunk])
    assert [row.messages[-1] for row in found.rows] == [SAID, DONE]
    assert [each.messages for each in conversations(found)] == [(USER, SAID), (USER, DONE)]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("request_json", "answer"),
    [
        pytest.param(
            {
                "messages": [
                    {"role": "system", "content": "be kind"},
                    {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "3"},
                ],
                "tools": [TOOL],
            },
            {"choices": [{"index": 0, "message": {"role": "assistant", "content": "three"}}]},
            id="chat",
        ),
        pytest.param(
            {
                "system": "be kind",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "look"},
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                        ],
                    },
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]}
                        ],
                    },
                ],
                "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "three"}]},
            id="messages",
        ),
        pytest.param(
            {
                "instructions": "be kind",
                "input": [
                    {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
                    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "3"},
                ],
                "tools": [{"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}}],
            },
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": "three"}]}]},
            id="responses",
        ),
    ],
)
def test_conversations_of_all_apis_are_the_same_chat_messages(request_json: Any, answer: Any) -> None:
    found = said_in(request_json, answer)
    assert found.messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "three"},
    )
    assert found.tools == (TOOL,)
    assert transcript(found.messages).splitlines() == [
        "system: be kind",
        "user: look[image_url]",
        'assistant calls add({"a": 1})',
        "tool c1: 3",
        "assistant: three",
    ]


def test_answers_that_call_tools_are_read_in_every_api() -> None:
    block = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "hm"}
    of_messages = said_in({"messages": [USER]}, {"type": "message", "content": [thought, block]})
    assert of_messages.messages[-1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [CALL],
    }
    item = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    of_responses = said_in({"input": "hello"}, {"output": [item]})
    assert of_responses.messages == (USER, {"role": "assistant", "content": None, "tool_calls": [CALL]})
    of_completions = said_in({"prompt": "hello"}, {"choices": [{"index": 0, "text": "hi"}]})
    assert of_completions.messages == (USER, SAID)


def test_a_record_without_texts_has_tokens_and_no_messages() -> None:
    found = trajectory([chunk_of(records_of([plain([1], [2])], []))])
    assert (found.rows[0].messages, found.rows[0].tools, conversations(found)) == ((), (), ())


@given(world=attempts())
@settings(deadline=None)
def test_triplets_are_the_kept_calls_in_order(world: World) -> None:
    scored = attach(trajectory([chunk_of(records_of(*world))]), [AttemptReward(value=1.0)])
    dropped = dropped_calls(world)
    kept = [call for index, call in enumerate(world[0]) if index not in dropped]
    found = triplets(assign_credit(scored, CreditSettings()).rows)
    assert [(list(each.prompt_ids), list(each.response_ids), list(each.logprobs)) for each in found] == [
        (call.prompt, call.completion, call.logprobs) for call in kept
    ]
    assert {each.reward for each in found} <= {1.0}


def _file_rows(world: World, view: View, rewards: list[AttemptReward]) -> list[dict[str, Any]]:
    scored = attach(trajectory([chunk_of(records_of(*world))]), rewards)
    settings = CreditSettings(option=CreditOption.PER_STEP)
    return list(records(view, ATTEMPT, scored, assign_credit(scored, settings)))


@given(world=attempts(), step=st.integers(0, 3), view=st.sampled_from(list(View)))
@settings(max_examples=25, deadline=None)
def test_parquet_gives_back_what_json_lines_have(
    tmp_path_factory: pytest.TempPathFactory, world: World, step: int, view: View
) -> None:
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("files")
    rows = _file_rows(world, view, [AttemptReward(value=0.5), AttemptReward(value=0.1, step=step)])
    with writing_jsonl(folder / "x.jsonl") as lines, writing_parquet(folder / "x.parquet", COLUMNS[view]) as table:
        for row in rows:
            assert list(row) == list(COLUMNS[view])
            lines.write(row)
            table.write(row)
    expected = [json.loads(line) for line in (folder / "x.jsonl").read_text().splitlines()]
    nested = [name for name, column in COLUMNS[view].items() if column == "nested"]
    found = pq.read_table(folder / "x.parquet").to_pylist()
    for row in found:
        row |= {name: row[name] and json.loads(row[name]) for name in nested}
    assert found == expected
    if view is View.ROWS:
        packed = b"".join(pack_token_ids(row["response_ids"]) + pack_logprobs(row["logprobs"]) for row in rows)
        assert packed == b"".join(pack_token_ids(row["response_ids"]) + pack_logprobs(row["logprobs"]) for row in found)


def test_rows_are_written_by_groups_and_not_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(row_files, "ROWS_PER_GROUP", 2)
    [row] = _file_rows(([plain([1], [2])], []), View.TRIPLETS, [])
    with writing_parquet(tmp_path / "x.parquet", COLUMNS[View.TRIPLETS]) as table:
        for _ in range(5):
            table.write(row)
    file = pq.ParquetFile(tmp_path / "x.parquet")
    assert [file.metadata.row_group(place).num_rows for place in range(file.num_row_groups)] == [2, 2, 1]


def test_a_file_that_is_not_finished_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing_parquet(tmp_path / "x.parquet", COLUMNS[View.ROWS]):
        raise KeyError("the agent's fault")
    assert not list(tmp_path.iterdir())


def test_spans_that_are_no_calls_make_no_rows() -> None:
    found = trajectory([chunk_of([SpanRecord()])])
    scored = attach(found, [])
    assert [list(records(view, ATTEMPT, scored, assign_credit(scored, CreditSettings()))) for view in View] == [
        [],
        [],
        [],
    ]
