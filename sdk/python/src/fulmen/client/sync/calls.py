"""Recorded calls of an app, and their conversations. Made by tools/sync_client.py of `fulmen.client.aio.calls`."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from typing import Any

from fulmen.client.aio.calls import AsyncCallQuery, AsyncCalls
from fulmen.client.calls import Conversation, RecordedCall
from fulmen.client.face import Face, faced
from fulmen.client.view import Named

__all__ = ["CallQuery", "Calls"]


class CallQuery(Face):
    """Recorded calls that a filter selects, newest first, with their texts; read when they are iterated over."""

    _wraps = AsyncCallQuery
    _aio: AsyncCallQuery

    def __iter__(self) -> Iterator[RecordedCall]:
        """Iterates over the calls.

        Raises:
            ArgumentInvalid: if the filter is malformed.
        """
        return self._iterate(self._aio.__aiter__())

    def to_list(self) -> list[RecordedCall]:
        """Returns all of them."""
        return self._call(self._aio.to_list())

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with one row per call.

        Its columns: call, conversation, model, backend, policy, policy_version, http_status, error, finish_reason,
        messages, answer, prompt_tokens, completion_tokens, cost_usd, duration_s, score, label and created (UTC).

        Raises:
            ExtraMissing: if pandas is not installed.
        """
        return self._call(self._aio.to_pandas())

    @property
    def aio(self) -> AsyncCallQuery:
        """The same, asynchronous, over the same connection."""
        return self._aio


class Calls(Face):
    """Recorded calls of an app: those without an attempt, on routes that record."""

    _wraps = AsyncCalls
    _aio: AsyncCalls

    def list(self, *, filter: str = "", limit: int | None = None) -> CallQuery:
        """Selects calls, newest first.

        >>> client.calls.list(filter="model = assistant AND score > 0.5", limit=10).to_list()
        []

        Args:
            filter: only calls that match, in the grammar of AIP-160, such as `model = assistant AND http_status = 200`.
            limit: maximum number; None for all.
        """
        return faced(self._aio.list(filter=filter, limit=limit))

    def get(self, call: str) -> RecordedCall:
        """Returns a call.

        Args:
            call: its name.

        Raises:
            CallNotFound: if there is none.
        """
        return self._call(self._aio.get(call))

    def conversations(self, *, filter: str = "", limit: int | None = None) -> Iterator[Conversation]:
        """Yields conversations, newest first.

        >>> [each.call_count for each in client.calls.conversations(filter="call_count > 3")]
        []

        Args:
            filter: only conversations that match, such as `score < 0.5`.
            limit: maximum number; None for all.

        Raises:
            ArgumentInvalid: if the filter is malformed.
        """
        return self._iterate(self._aio.conversations(filter=filter, limit=limit))

    def rate(self, conversation: str | Named, score: float | None, *, label: str = "") -> Conversation:
        """Says how good a conversation was; replaces what was said before.

        Args:
            conversation: its id, as in the header `x-fulmen-conversation`, its name or its record.
            score: a number; None removes it.
            label: a word about it, at most 128 characters.

        Raises:
            CallNotFound: if it was not recorded, or its first call has not arrived yet, which takes a few seconds.
            ArgumentInvalid: if the score is not finite, or the label too long.
        """
        return self._call(self._aio.rate(conversation, score, label=label))

    def delete(self, conversations: Iterable[str | Named]) -> int:
        """Deletes conversations with all their calls, for good; returns the number of calls.

        >>> client.calls.delete(["chat-of-somebody-who-left"])
        0

        Args:
            conversations: ids, names or records. Those that do not exist are left out.
        """
        return self._call(self._aio.delete(conversations))

    def demonstrations(self, *, filter: str = "", limit: int | None = None) -> builtins.list[dict[str, Any]]:
        """Returns demonstrations: of each conversation, the messages of its longest complete call with the answer.

        >>> client.calls.demonstrations(filter="score > 0.5")
        []

        Args:
            filter: only of calls that match.
            limit: maximum number of calls that are read, the newest ones; None for all.
        """
        return self._call(self._aio.demonstrations(filter=filter, limit=limit))

    def tasks(self, *, filter: str = "", limit: int | None = None) -> builtins.list[dict[str, Any]]:
        """Returns tasks: of each conversation, the messages of its longest complete call, and the recorded answer.

        >>> client.calls.tasks(filter="model = assistant")
        []

        Args:
            filter: only of calls that match.
            limit: maximum number of calls that are read, the newest ones; None for all.
        """
        return self._call(self._aio.tasks(filter=filter, limit=limit))

    @property
    def aio(self) -> AsyncCalls:
        """The same, asynchronous, over the same connection."""
        return self._aio
