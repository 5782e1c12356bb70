"""Recorded calls and conversations as records."""

from __future__ import annotations

import datetime
import json
from typing import Any, ClassVar

from fulmen.client.view import View
from fulmen.messages import moment, seconds
from fulmen.store.v1 import call_pb2

__all__ = ["Conversation", "RecordedCall"]

MICROS_PER_DOLLAR = 1e6


class RecordedCall(View[call_pb2.RecordedCall]):
    """A model call of an app that was recorded."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name", "model", "http_status")

    @property
    def name(self) -> str:
        """`projects/{project}/calls/{uuid}`."""
        return str(self.proto.name)

    @property
    def conversation(self) -> str:
        """`projects/{project}/conversations/{conversation}`."""
        return str(self.proto.conversation)

    @property
    def model(self) -> str:
        """The model that the app requested."""
        return str(self.proto.model)

    @property
    def backend(self) -> str:
        """`backends/{id}` that answered; empty if none did."""
        return str(self.proto.backend)

    @property
    def policy(self) -> str:
        """The policy that answered; empty if it is not trained."""
        return str(self.proto.policy)

    @property
    def policy_version(self) -> int:
        """Version of the policy; 0 without one."""
        return int(self.proto.policy_version)

    @property
    def http_status(self) -> int:
        """HTTP status of the answer; 0 if the app disconnected first."""
        return int(self.proto.http_status)

    @property
    def error(self) -> str:
        """Kind of error; empty if the answer is complete."""
        return str(self.proto.error)

    @property
    def finish_reason(self) -> str:
        """Why the model stopped, such as `stop` or `length`; empty if unknown."""
        return str(self.proto.finish_reason)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the request, as chat messages."""
        return list(json.loads(self.proto.content.messages_json or b"[]"))

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of the request, in the format of the chat API."""
        return list(json.loads(self.proto.content.tools_json or b"[]"))

    @property
    def answer(self) -> dict[str, Any] | None:
        """The answer as a chat message; None without one."""
        return json.loads(self.proto.content.answer_json) if self.proto.content.answer_json else None

    @property
    def prompt_token_count(self) -> int:
        """Prompt tokens; 0 if unknown."""
        return int(self.proto.prompt_token_count)

    @property
    def completion_token_count(self) -> int:
        """Sampled tokens; 0 if unknown."""
        return int(self.proto.completion_token_count)

    @property
    def cost_usd(self) -> float:
        """Cost by the proxy's price table, US dollars."""
        return self.proto.cost_micros / MICROS_PER_DOLLAR

    @property
    def duration_s(self) -> float:
        """Time until the answer was complete, seconds."""
        return seconds(self.proto.duration)

    @property
    def create_time(self) -> datetime.datetime | None:
        """When it arrived, UTC."""
        return moment(self.proto.create_time)

    @property
    def expire_time(self) -> datetime.datetime | None:
        """When it is deleted, UTC."""
        return moment(self.proto.expire_time)

    @property
    def score(self) -> float | None:
        """Score of its conversation; None if it was not rated."""
        return self.proto.score if self.proto.HasField("score") else None

    @property
    def label(self) -> str:
        """Label of its conversation."""
        return str(self.proto.label)


class Conversation(View[call_pb2.Conversation]):
    """Recorded calls that belong together."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name", "call_count", "score")

    @property
    def name(self) -> str:
        """`projects/{project}/conversations/{conversation}`."""
        return str(self.proto.name)

    @property
    def id(self) -> str:
        """The id in its name: from the header `x-fulmen-conversation`, or assigned by the store."""
        return self.name.rpartition("/")[2]

    @property
    def model(self) -> str:
        """Model of its first recorded call."""
        return str(self.proto.model)

    @property
    def call_count(self) -> int:
        """Number of recorded calls."""
        return int(self.proto.call_count)

    @property
    def score(self) -> float | None:
        """Score; None if it was not rated."""
        return self.proto.score if self.proto.HasField("score") else None

    @property
    def label(self) -> str:
        """Label; empty if there is none."""
        return str(self.proto.label)

    @property
    def create_time(self) -> datetime.datetime | None:
        """When its first recorded call arrived, UTC."""
        return moment(self.proto.create_time)

    @property
    def update_time(self) -> datetime.datetime | None:
        """When its last recorded call arrived, UTC."""
        return moment(self.proto.update_time)
