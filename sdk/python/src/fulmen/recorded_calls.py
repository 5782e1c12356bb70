"""Makes training data from recorded calls: demonstrations to imitate, or tasks with the recorded answer.

Invariant: a conversation yields at most one row, from its longest complete call; a conversation that is contained in
another row yields none. Rows with the same prompt are all used for training or all for validation, whatever else is
recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from fulmen.store.v1 import call_pb2
from fulmen.training.task_files import MAX_TASK_BYTES

__all__ = ["DataSet", "RowKind", "data_set"]

OK: Final = 200
_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
_ANSWER_FIELDS: Final = ("role", "content", "tool_calls", "reasoning_content")

Row = dict[str, Any]


class RowKind(StrEnum):
    """What rows are for."""

    DEMONSTRATIONS = "demonstrations"
    TASKS = "tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Rows of conversations.

    Attributes:
        train: Rows to train on.
        validation: Rows to validate on.
        calls: Number of calls that were read.
        conversations: Number of their conversations.
        skipped: Numbers of conversations without a row, by reason.
    """

    train: list[Row]
    validation: list[Row]
    calls: int
    conversations: int
    skipped: Mapping[str, int]


@dataclass(slots=True, kw_only=True)
class _Said:
    """The longest complete call of a conversation, with the hashes of its beginnings; the last one is of the whole
    conversation."""

    messages: list[Row]
    tools: list[Row]
    answer: Row
    hashes: list[bytes] = field(default_factory=list)


def data_set(calls: Iterable[call_pb2.RecordedCall], kind: RowKind, *, validation_share: float = 0.1) -> DataSet:
    """Makes a data set from calls with their texts, newest first, as returned by lists.

    Args:
        calls: The calls.
        kind: What rows are for.
        validation_share: Share of the rows that are used for validation, at least 0 and less than 1; at least one prompt,
            unless it is 0 or there is only one prompt.
    """
    longest: dict[str, call_pb2.RecordedCall] = {}
    count, names = 0, set()
    for call in calls:
        count += 1
        names.add(call.conversation)
        held = longest.get(call.conversation)
        if _is_complete(call) and (held is None or call.message_count > held.message_count):
            longest[call.conversation] = call
    skipped = Counter(without_a_complete_call=len(names) - len(longest))
    said = []
    for each in map(_said, longest.values()):
        if reason := _unfit(each, kind):
            skipped[reason] += 1
        else:
            said.append(each)
    kept = _distinct(said)
    skipped["said_in_another"] = len(said) - len(kept)
    train, validation = _split(kept, validation_share)
    return DataSet(
        train=[_row(each, kind) for each in train],
        validation=[_row(each, kind) for each in validation],
        calls=count,
        conversations=len(names),
        skipped={reason: number for reason, number in skipped.items() if number},
    )


def _is_complete(call: call_pb2.RecordedCall) -> bool:
    return call.http_status == OK and not call.error and bool(call.content.answer_json)


def _unfit(said: _Said, kind: RowKind) -> str:
    """Returns why a call cannot be trained on; empty if it can."""
    if not said.messages or any(message["role"] not in _ROLES for message in said.messages):
        return "with_messages_of_an_unknown_role"
    if not (said.answer.get("content") or said.answer.get("tool_calls")):
        return "with_an_empty_answer"
    if kind is RowKind.TASKS and not isinstance(said.answer.get("content") or None, str):
        return "without_a_text_as_answer"
    if len(json.dumps(_row(said, kind), ensure_ascii=False).encode(errors="replace")) >= MAX_TASK_BYTES:
        return "longer_than_a_row_may_be"
    return ""


def _chat(message: Row) -> Row:
    """Returns a message with a role that training knows."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _said(call: call_pb2.RecordedCall) -> _Said:
    content = call.content
    answer = json.loads(content.answer_json)
    said = _Said(
        # Items of the Responses API that are not messages, such as reasoning, have no role.
        messages=[_chat(each) for each in json.loads(content.messages_json) if each.get("role")],
        tools=json.loads(content.tools_json or b"[]"),
        answer={name: answer[name] for name in _ANSWER_FIELDS if answer.get(name) or name == "content"},
    )
    digest = b""
    for message in [*said.messages, said.answer]:
        told = {name: message.get(name) or None for name in ("role", "content", "tool_calls")}
        digest = hashlib.sha256(digest + json.dumps(told, sort_keys=True).encode()).digest()
        said.hashes.append(digest)
    return said


def _distinct(said: Sequence[_Said]) -> list[_Said]:
    """Returns the conversations that are not contained in another one."""
    begun = {digest for each in said for digest in each.hashes[:-1]}
    kept: dict[bytes, _Said] = {}
    for each in said:
        if each.hashes[-1] not in begun:
            kept.setdefault(each.hashes[-1], each)
    return list(kept.values())


def _split(said: list[_Said], share: float) -> tuple[list[_Said], list[_Said]]:
    """Splits by the hash of the prompt, in its order, which is independent of the prompt's content."""
    ordered = sorted(said, key=lambda each: (each.hashes[-2], each.hashes[-1]))
    bound = int(share * 2**64)
    first = sum(int.from_bytes(each.hashes[-2][:8]) < bound for each in ordered)
    if bound and not first and len(ordered) > 1:
        first = sum(each.hashes[-2] == ordered[0].hashes[-2] for each in ordered)
    if first == len(ordered):
        first = 0  # there is one prompt, or hardly more
    return ordered[first:], ordered[:first]


def _row(said: _Said, kind: RowKind) -> Row:
    offered = {"tools": said.tools} if said.tools else {}
    if kind is RowKind.DEMONSTRATIONS:
        return {"messages": [*said.messages, said.answer], **offered}
    return {"input": {"messages": said.messages, **offered}, "answer": said.answer["content"]}
