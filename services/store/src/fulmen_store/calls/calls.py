"""Recorded calls: what is kept of them, to which conversation each belongs, and what filters can compare."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from fulmen_store.rollouts.filter import Schema

__all__ = [
    "CALLS",
    "CONVERSATIONS",
    "CallRecord",
    "CallView",
    "ConversationGrowth",
    "ConversationView",
    "grouped",
    "growths",
]

CALLS: Final = Schema(
    types={
        "conversation": "text",
        "model": "text",
        "backend": "text",
        "policy": "text",
        "policy_version": "bigint",
        "http_status": "int",
        "error": "text",
        "finish_reason": "text",
        "create_time": "timestamptz",
        "duration": "float8",
        "prompt_token_count": "bigint",
        "completion_token_count": "bigint",
        "cost_micros": "bigint",
        "message_count": "int",
        "score": "float8",
        "label": "text",
    },
    durations=frozenset({"duration"}),
)
"""Fields of a call."""

CONVERSATIONS: Final = Schema(
    types={
        "conversation": "text",
        "model": "text",
        "call_count": "bigint",
        "create_time": "timestamptz",
        "update_time": "timestamptz",
        "score": "float8",
        "label": "text",
    }
)
"""Fields of a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A call to be stored.

    Attributes:
        conversation: Its id; empty if the app named none.
        content: Serialized `CallContent`.
        size_bytes: What it counts towards the limit of its project.
        end_hash: Hash over messages and answer; None without an answer.
        prefixes: Hashes of the beginnings that end with an answer, longest first.
    """

    id: UUID
    conversation: str
    model: str
    backend: str
    policy: str
    policy_version: int
    http_status: int
    error: str
    finish_reason: str
    created_at: datetime.datetime
    duration_s: float
    prompt_token_count: int
    cached_token_count: int
    completion_token_count: int
    cost_micros: int
    message_count: int
    content: bytes
    size_bytes: int
    end_hash: bytes | None
    prefixes: Sequence[bytes]
    retention: datetime.timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """A stored call; `content` is None in lists without texts."""

    id: UUID
    conversation: str
    model: str
    backend: str
    policy: str
    policy_version: int
    http_status: int
    error: str
    finish_reason: str
    created_at: datetime.datetime
    duration_s: float
    prompt_token_count: int
    cached_token_count: int
    completion_token_count: int
    cost_micros: int
    message_count: int
    size_bytes: int
    expires_at: datetime.datetime
    score: float | None
    label: str
    content: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationView:
    """A stored conversation."""

    conversation: str
    model: str
    call_count: int
    score: float | None
    label: str
    created_at: datetime.datetime
    updated_at: datetime.datetime


@dataclass(slots=True, kw_only=True)
class ConversationGrowth:
    """The calls that are added to a conversation."""

    id: str
    model: str
    call_count: int
    created_at: datetime.datetime
    updated_at: datetime.datetime


def grouped(calls: Iterable[CallRecord], stored: Mapping[bytes, str]) -> list[CallRecord]:
    """Returns calls with their conversations: the one that the app named, the one they continue, or a new one.

    Args:
        calls: Calls of one project, in the order of their arrival.
        stored: Conversations of stored calls by their hashes.
    """
    ends = dict(stored)
    found = []
    for call in calls:
        continued = next((ends[prefix] for prefix in call.prefixes if prefix in ends), "")
        call = replace(call, conversation=call.conversation or continued or call.id.hex)
        if call.end_hash is not None:
            ends[call.end_hash] = call.conversation
        found.append(call)
    return found


def growths(calls: Iterable[CallRecord]) -> list[ConversationGrowth]:
    """Returns what calls add to each conversation."""
    found: dict[str, ConversationGrowth] = {}
    for call in calls:
        at, seen = call.created_at, found.get(call.conversation)
        if seen is None:
            found[call.conversation] = ConversationGrowth(
                id=call.conversation, model=call.model, call_count=1, created_at=at, updated_at=at
            )
        else:
            seen.call_count += 1
            seen.created_at, seen.updated_at = min(seen.created_at, at), max(seen.updated_at, at)
    return list(found.values())
