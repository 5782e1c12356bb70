"""Has guards judge a call before it is sent, and its answer before it is given."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.api import UNREADABLE, encode
from fulmen_llm_proxy.apis.errors import GUARD_REFUSED, GUARD_UNAVAILABLE
from fulmen_llm_proxy.apis.sse import DONE, EventSplitter, event_data
from fulmen_llm_proxy.calls.answer_writer import AnswerWriter, DisconnectWatch, Header
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.calls.running_call import RunningCall
from fulmen_llm_proxy.guards.guard import GuardRefused, Guards, Phase

_ANSWERED = 200


class CallGuards:
    """Asks the guards about calls."""

    def __init__(self, guards: Guards, *, max_answer_bytes: int) -> None:
        """Sets the guards, and the largest answer that is kept for them, bytes."""
        self._guards = guards
        self._max_answer_bytes = max_answer_bytes

    async def before(self, call: RunningCall) -> None:
        """Has a call judged.

        Raises:
            Refused: if it is refused, or could not be judged.
        """
        if self._guards.any(Phase.BEFORE):
            await self._require(Phase.BEFORE, call, {})

    def guarded(self, call: RunningCall, writer: AnswerWriter) -> AnswerWriter:
        """Returns a writer that gives an answer when it has been judged."""
        if not self._guards.any(Phase.AFTER):
            return writer
        return _GuardedWriter(self, call, writer, max_bytes=self._max_answer_bytes)

    async def after(self, call: RunningCall, answer: dict[str, object]) -> None:
        """Has an answer judged.

        Raises:
            Refused: if it is refused, or could not be judged.
        """
        await self._require(Phase.AFTER, call, answer)

    async def _require(self, phase: Phase, call: RunningCall, answer: dict[str, object]) -> None:
        document = {
            "phase": phase.value,
            "project": call.caller.project,
            "attempt": call.caller.attempt,
            "model": call.request.model,
            "api": call.request.api.name.value,
            "request": call.request.fields,
            **answer,
        }
        try:
            await self._guards.require(phase, encode(document))
        except GuardRefused as refusal:
            status, code = (403, GUARD_REFUSED) if refusal.is_verdict else (503, GUARD_UNAVAILABLE)
            raise Refused(status, code, str(refusal)) from refusal


class _GuardedWriter:
    """Holds an answer, also a stream, until the guards have checked it; errors are passed immediately."""

    def __init__(self, guards: CallGuards, call: RunningCall, writer: AnswerWriter, *, max_bytes: int) -> None:
        self._guards = guards
        self._call = call
        self._writer = writer
        self._left_bytes = max_bytes
        self._head: tuple[bytes, Sequence[Header]] = (b"", ())
        self._kept: list[bytes] = []

    def watch(self) -> DisconnectWatch:
        """Returns a watch for the caller's disconnect."""
        return self._writer.watch()

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Writes a complete answer."""
        if status == _ANSWERED:
            await self._guards.after(self._call, {"answer": _document(body)})
        await self._writer.whole(status, body, content_type, extra)

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Keeps the headers of a stream."""
        self._head = (content_type, extra)

    async def piece(self, data: bytes) -> None:
        """Keeps events."""
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise Refused(502, "answer_too_large", "The answer is too large for the guards to check.")
        self._kept.append(data)

    async def end(self) -> None:
        """Writes the stream."""
        events = b"".join(self._kept)
        await self._guards.after(self._call, {"answer": self._whole(events)})
        await self._writer.begin(*self._head)
        await self._writer.piece(events)
        await self._writer.end()

    def _whole(self, events: bytes) -> msgspec.Raw | None:
        """Returns the answer of a stream as it would be whole; None if it cannot be read."""
        splitter = EventSplitter(len(events))
        found = [event_data(each) for each in (*splitter.feed(events), splitter.rest())]
        try:
            return msgspec.Raw(self._call.request.api.assemble([each for each in found if each and each != DONE]))
        except (BackendUnavailable, *UNREADABLE):
            return None


def _document(body: bytes) -> msgspec.Raw | None:
    """Returns an answer to be put into a document as it is; None if it is not JSON, which could change the rest of
    it."""
    try:
        return msgspec.json.decode(body, type=msgspec.Raw)
    except UNREADABLE:
        return None
