"""Recorded calls as the proxy sends them, for tests of the store."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from typing import Any

from google.protobuf.duration_pb2 import Duration

from fulmen.ids import call_name, conversation_name, uuid7
from fulmen.store.v1 import call_pb2
from fulmen.store.v1 import call_service_pb2 as pb

DEFAULT = "projects/default"
DAY_S = 86_400
# Ids of one millisecond have no order.
_moments = itertools.count(time.time_ns() // 1_000_000)


def said(*texts: str) -> bytes:
    """Returns a hash of texts, as of messages and an answer."""
    return hashlib.sha256("\n".join(texts).encode()).digest()


def new_call(
    *texts: str,
    answer: str = "yes",
    project: str = DEFAULT,
    conversation: str = "",
    retention_s: int = 30 * DAY_S,
    **fields: Any,
) -> pb.NewCall:
    """Returns a call with these messages, of user and assistant in turn, and an answer."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    content = call_pb2.CallContent(
        messages_json=json.dumps(messages).encode(),
        answer_json=json.dumps({"role": "assistant", "content": answer}).encode() if answer else b"",
    )
    usual: dict[str, Any] = {"model": "assistant", "backend": "backends/one", "http_status": 200}
    call = call_pb2.RecordedCall(
        name=call_name(project, uuid7(next(_moments))),
        conversation=conversation_name(project, conversation) if conversation else "",
        message_count=len(messages),
        content=content,
        **(usual | fields),
    )
    call.create_time.FromNanoseconds(time.time_ns())
    return pb.NewCall(
        call=call,
        end_hash=said(*texts, answer) if answer else b"",
        prefix_hashes=[said(*texts[:end]) for end in range(len(texts) - len(texts) % 2, 0, -2)],
        retention=Duration(seconds=retention_s),
    )
