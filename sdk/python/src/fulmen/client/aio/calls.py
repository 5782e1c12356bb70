"""Recorded calls of an app, and their conversations."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fulmen.client.aio.base import Part, Session, listed
from fulmen.client.calls import Conversation, RecordedCall
from fulmen.client.frames import calls_frame
from fulmen.client.view import Named, name_of
from fulmen.ids import conversation_name
from fulmen.recorded_calls import RowKind, data_set
from fulmen.store.v1 import call_service_pb2 as pb

__all__ = ["AsyncCallQuery", "AsyncCalls"]

BATCH_SIZE = 1000


class AsyncCallQuery:
    """Recorded calls that a filter selects, newest first, with their texts; read when they are iterated over."""

    def __init__(self, session: Session, request: pb.ListCallsRequest, *, limit: int | None) -> None:
        """Reads nothing yet."""
        self._session = session
        self._request = request
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[RecordedCall]:
        """Iterates over the calls.

        Raises:
            ArgumentInvalid: if the filter is malformed.
        """
        request = pb.ListCallsRequest()
        request.CopyFrom(self._request)
        async for each in listed(self._session.services.calls.ListCalls, request, "calls", self._limit):
            yield RecordedCall(each)

    async def to_list(self) -> list[RecordedCall]:
        """Returns all selected calls as a list."""
        return [each async for each in self]

    async def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with one row per call.

        Its columns: call, conversation, model, backend, policy, policy_version, http_status, error, finish_reason,
        messages, answer, prompt_tokens, completion_tokens, cost_usd, duration_s, score, label and created (UTC).

        Raises:
            ExtraMissing: if pandas is not installed.
        """
        return calls_frame(await self.to_list())


class AsyncCalls(Part):
    """Recorded calls of an app: those without an attempt, on routes that record."""

    def list(self, *, filter: str = "", limit: int | None = None) -> AsyncCallQuery:
        """Selects calls, newest first.

        >>> await client.calls.list(filter="model = assistant AND score > 0.5", limit=10).to_list()
        []

        Args:
            filter: only calls that match, in the grammar of AIP-160, such as `model = assistant AND http_status = 200`.
            limit: maximum number; None for all.
        """
        request = pb.ListCallsRequest(project=self._session.project, filter=filter, with_content=True)
        return AsyncCallQuery(self._session, request, limit=limit)

    async def get(self, call: str) -> RecordedCall:
        """Returns a call.

        Args:
            call: its name.

        Raises:
            CallNotFound: if it does not exist.
        """
        return RecordedCall((await self._services.calls.GetCall(pb.GetCallRequest(name=call))).call)

    async def conversations(self, *, filter: str = "", limit: int | None = None) -> AsyncIterator[Conversation]:
        """Yields conversations, newest first.

        >>> [each.call_count async for each in client.calls.conversations(filter="call_count > 3")]
        []

        Args:
            filter: only conversations that match, such as `score < 0.5`.
            limit: maximum number; None for all.

        Raises:
            ArgumentInvalid: if the filter is malformed.
        """
        request = pb.ListConversationsRequest(project=self._session.project, filter=filter)
        async for each in listed(self._services.calls.ListConversations, request, "conversations", limit):
            yield Conversation(each)

    async def rate(self, conversation: str | Named, score: float | None, *, label: str = "") -> Conversation:
        """Sets the score and the label of a conversation; replaces earlier ones.

        Args:
            conversation: its id, as in the header `x-fulmen-conversation`, its name or its record.
            score: a number; None removes it.
            label: a label, at most 128 characters.

        Raises:
            CallNotFound: if it was not recorded, or its first call has not arrived yet, which takes a few seconds.
            ArgumentInvalid: if the score is not finite, or the label is too long.
        """
        request = pb.RateConversationRequest(name=self._name(conversation), score=score, label=label)
        return Conversation((await self._services.calls.RateConversation(request)).conversation)

    async def delete(self, conversations: Iterable[str | Named]) -> int:
        """Permanently deletes conversations with all their calls; returns the number of deleted calls.

        >>> await client.calls.delete(["chat-of-somebody-who-left"])
        0

        Args:
            conversations: ids, names or records. Conversations that do not exist are ignored.
        """
        names, count = [self._name(each) for each in conversations], 0
        for start in range(0, len(names), BATCH_SIZE):
            request = pb.DeleteConversationsRequest(names=names[start : start + BATCH_SIZE])
            count += (await self._services.calls.DeleteConversations(request)).deleted_call_count
        return count

    async def demonstrations(self, *, filter: str = "", limit: int | None = None) -> builtins.list[dict[str, Any]]:
        """Returns demonstrations: for each conversation, the messages of its longest complete call with the answer.

        >>> await client.calls.demonstrations(filter="score > 0.5")
        []

        Args:
            filter: only of calls that match.
            limit: maximum number of calls that are read, the newest ones; None for all.
        """
        return await self._rows(RowKind.DEMONSTRATIONS, filter, limit)

    async def tasks(self, *, filter: str = "", limit: int | None = None) -> builtins.list[dict[str, Any]]:
        """Returns tasks: for each conversation, the messages of its longest complete call, and the recorded answer.

        >>> await client.calls.tasks(filter="model = assistant")
        []

        Args:
            filter: only of calls that match.
            limit: maximum number of calls that are read, the newest ones; None for all.
        """
        return await self._rows(RowKind.TASKS, filter, limit)

    async def _rows(self, kind: RowKind, filter: str, limit: int | None) -> builtins.list[dict[str, Any]]:
        found = [call.proto async for call in self.list(filter=filter, limit=limit)]
        return data_set(found, kind, validation_share=0).train

    def _name(self, conversation: str | Named) -> str:
        name = name_of(conversation)
        return name if name.startswith("projects/") else conversation_name(self._session.project, name)
