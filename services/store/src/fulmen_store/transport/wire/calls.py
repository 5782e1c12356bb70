"""Recorded calls and conversations, from and to protobuf."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Final

from fulmen.errors import Violation
from fulmen.ids import call_name, conversation_name, parse_call_name, parse_conversation_name
from fulmen.store.v1 import call_pb2
from fulmen.store.v1 import call_service_pb2 as pb
from fulmen_store.calls.calls import CallRecord, CallView, ConversationView
from fulmen_store.database.stored import read_column
from fulmen_store.malformed import malformed_request, noted

__all__ = ["call_message", "conversation_message", "read_calls"]

MAX_PREFIXES: Final = 32
MAX_CONTENT_BYTES: Final = 1024 * 1024
ROW_BYTES: Final = 1024
"""What a call takes besides its texts: its row, its places in indexes, and its conversation."""
MAX_TEXT: Final = 128
HASH_BYTES: Final = 32
MIN_RETENTION_S: Final = 3600
MAX_RETENTION_S: Final = 10 * 366 * 86_400
MAX_COUNT: Final = 2**31 - 1
TEXTS: Final = ("model", "backend", "policy", "error", "finish_reason")
COUNTS: Final = ("message_count", "prompt_token_count", "cached_token_count", "completion_token_count", "http_status")
_NS_PER_S: Final = 10**9


def read_calls(messages: Sequence[pb.NewCall]) -> dict[str, list[CallRecord]]:
    """Decodes calls to store, by project.

    Raises:
        ArgumentInvalid: With every problem.
    """
    problems: list[Violation] = []
    found: dict[str, list[CallRecord]] = {}
    for index, message in enumerate(messages):
        with noted(problems):
            project, record = _record(message, f"calls[{index}]")
            found.setdefault(project, []).append(record)
    if problems:
        raise malformed_request(problems)
    return found


def _record(message: pb.NewCall, path: str) -> tuple[str, CallRecord]:
    problems = [Violation(field=f"{path}.{name}", description=text) for name, text in _problems(message)]
    project, conversation = "", ""
    with noted(problems):
        project, call_id = parse_call_name(message.call.name, field=f"{path}.call.name")
    if message.call.conversation:
        with noted(problems):
            of, conversation = parse_conversation_name(message.call.conversation, field=f"{path}.call.conversation")
            if project and of != project:
                problems.append(Violation(field=f"{path}.call.conversation", description="is of another project"))
    if problems:
        raise malformed_request(problems)
    call, content = message.call, message.call.content.SerializeToString()
    return project, CallRecord(
        id=call_id,
        conversation=conversation,
        model=call.model,
        backend=call.backend.removeprefix("backends/"),
        policy=call.policy,
        policy_version=call.policy_version,
        http_status=call.http_status,
        error=call.error,
        finish_reason=call.finish_reason,
        created_at=call.create_time.ToDatetime(tzinfo=datetime.UTC),
        duration_s=call.duration.ToNanoseconds() / _NS_PER_S,
        prompt_token_count=call.prompt_token_count,
        cached_token_count=call.cached_token_count,
        completion_token_count=call.completion_token_count,
        cost_micros=call.cost_micros,
        message_count=call.message_count,
        content=content,
        size_bytes=len(content) + ROW_BYTES,
        end_hash=message.end_hash or None,
        prefixes=list(message.prefix_hashes),
        retention=message.retention.ToTimedelta(),
    )


def _problems(message: pb.NewCall) -> list[tuple[str, str]]:
    call = message.call
    found = [
        (f"call.{name}", f"has a NUL character or more than {MAX_TEXT} characters")
        for name in TEXTS
        if len(getattr(call, name)) > MAX_TEXT or "\0" in getattr(call, name)
    ]
    found += [
        (f"call.{name}", f"must be 0 to {MAX_COUNT}") for name in COUNTS if not 0 <= getattr(call, name) <= MAX_COUNT
    ]
    if not 0 <= call.cost_micros < 1 << 53 or not 0 <= call.policy_version < 1 << 63:
        found.append(("call", "has a negative number, or a cost of more than 2^53"))
    if call.content.ByteSize() > MAX_CONTENT_BYTES:
        found.append(("call.content", f"has more than {MAX_CONTENT_BYTES} bytes"))
    if message.end_hash and len(message.end_hash) != HASH_BYTES:
        found.append(("end_hash", f"must have {HASH_BYTES} bytes"))
    prefixes = message.prefix_hashes
    if len(prefixes) > MAX_PREFIXES or any(len(each) != HASH_BYTES for each in prefixes):
        found.append(("prefix_hashes", f"must be at most {MAX_PREFIXES} of {HASH_BYTES} bytes"))
    if not MIN_RETENTION_S <= message.retention.seconds <= MAX_RETENTION_S or message.retention.nanos:
        found.append(("retention", f"must be {MIN_RETENTION_S} to {MAX_RETENTION_S} whole seconds"))
    try:
        call.create_time.ToDatetime(tzinfo=datetime.UTC)
        seconds = call.duration.ToNanoseconds() / _NS_PER_S
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= MAX_COUNT:
        found.append(("call", "has an invalid create_time or duration"))
    return found


def call_message(view: CallView, project: str) -> call_pb2.RecordedCall:
    """Returns a call as a message."""
    message = call_pb2.RecordedCall(
        name=call_name(project, view.id),
        conversation=conversation_name(project, view.conversation),
        model=view.model,
        backend=f"backends/{view.backend}" if view.backend else "",
        policy=view.policy,
        policy_version=view.policy_version,
        http_status=view.http_status,
        error=view.error,
        finish_reason=view.finish_reason,
        prompt_token_count=view.prompt_token_count,
        cached_token_count=view.cached_token_count,
        completion_token_count=view.completion_token_count,
        cost_micros=view.cost_micros,
        message_count=view.message_count,
        content=read_column(call_pb2.CallContent, view.content),
        score=view.score,
        label=view.label,
    )
    message.create_time.FromDatetime(view.created_at)
    message.duration.FromNanoseconds(round(view.duration_s * _NS_PER_S))
    message.expire_time.FromDatetime(view.expires_at)
    return message


def conversation_message(view: ConversationView, project: str) -> call_pb2.Conversation:
    """Returns a conversation as a message."""
    message = call_pb2.Conversation(
        name=conversation_name(project, view.conversation),
        model=view.model,
        call_count=view.call_count,
        score=view.score,
        label=view.label,
    )
    message.create_time.FromDatetime(view.created_at)
    message.update_time.FromDatetime(view.updated_at)
    return message
