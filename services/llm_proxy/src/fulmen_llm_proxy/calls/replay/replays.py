"""Answers the calls that an attempt repeats from the captures of the attempt that it continues.

Invariant: a call is answered from a capture only if its request has the same digest, and each capture answers one call. The
first request that fits no capture ends the replay: from there on calls are sampled.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from fulmen.errors import BackendUnavailable, FulmenError
from fulmen_llm_proxy.apis.api import UNREADABLE
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.backends.client import BackendAnswer, Dispatch
from fulmen_llm_proxy.calls.planner import CallPlanner
from fulmen_llm_proxy.calls.replay.captured_calls import CallSequence, CapturedCall, request_digest
from fulmen_llm_proxy.calls.replay.lost_attempts import LostAttempts
from fulmen_llm_proxy.calls.running_call import RunningCall
from fulmen_llm_proxy.calls.sender import FIRST_TRY
from fulmen_llm_proxy.metrics.replays import ReplayEnd, ReplayMetrics

MAX_ATTEMPTS: Final = 10_000
"""Maximum number of attempts that are remembered; the least recently used are forgotten first, and their replays end."""

_JSON: Final = b"application/json"
_HEADER: Final = (b"x-fulmen-replayed", b"true")
_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Replay:
    """The replay of one attempt.

    Attributes:
        reading: reads the calls.
        calls: those that have not been given; None before they are read, and after the end.
        ended: why it ended; None before.
    """

    reading: asyncio.Task[None] | None = None
    calls: CallSequence | None = None
    ended: ReplayEnd | None = None


class Replays:
    """The replays of this process; one event loop owns them."""

    def __init__(
        self,
        *,
        lost: LostAttempts,
        planner: CallPlanner,
        is_alone: Callable[[], bool],
        metrics: ReplayMetrics,
        max_bytes: int,
    ) -> None:
        """Sets the source of captures.

        Args:
            is_alone: whether no other process serves calls. Otherwise calls that the lost attempt made several times are
                sampled again: another process may have given one of their answers.
            max_bytes: memory for captures of all attempts; 0 replays nothing.
        """
        self._lost = lost
        self._planner = planner
        self._is_alone = is_alone
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._replays: OrderedDict[str, _Replay] = OrderedDict()
        self.size_bytes = 0

    async def find(self, call: RunningCall, attribution: Attribution) -> BackendAnswer | None:
        """Returns the captured answer to a call of an attempt that continues another one; None if it is to be sampled.

        Raises:
            FulmenError: if the call cannot be planned.
        """
        if not self._max_bytes or not call.request.api.generates:
            return None
        replay = self._replays.get(attribution.attempt)
        if replay is None:
            replay = self._remember(attribution)
        else:
            self._replays.move_to_end(attribution.attempt)
        if replay.reading is not None:
            # Not with its caller: others of the attempt may wait for it.
            await asyncio.shield(replay.reading)
        if replay.calls is None:
            return None
        try:
            dispatch = self._planner.plan(call, FIRST_TRY, whole=True)
        except BackendUnavailable:  # the sender waits for a backend, or tries the fallbacks
            return None
        if not dispatch.plan.captured:
            return None
        captured = self._take(replay, dispatch, call.request.model)
        answer = None if captured is None else _answer_of(captured)
        if captured is None or answer is None:
            self._end(attribution.attempt, replay, _end_without(replay.calls))
            return None
        for index, versions in captured.versions().items():
            # Noted for the capture, and not in the answer: the agent gets what it got before.
            dispatch.plan.reader.collected.choice(index).weight_versions = versions
        call.replayed_span, call.from_cache = captured.span_id, True
        self._metrics.replayed(captured.token_count)
        if replay.calls.is_over:
            self._end(attribution.attempt, replay, ReplayEnd.COMPLETE)
        return BackendAnswer(
            dispatch=dispatch, status=200, content_type=_JSON, retry_after="", headers=(_HEADER,), body=answer
        )

    def _remember(self, attribution: Attribution) -> _Replay:
        replay = self._replays[attribution.attempt] = _Replay()
        replay.reading = asyncio.create_task(self._read(replay, attribution), name="read-lost-attempts")
        # A caller may disconnect, and then the result is never read.
        replay.reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        if len(self._replays) > MAX_ATTEMPTS:
            oldest = next(iter(self._replays))
            self._end(oldest, self._replays[oldest], ReplayEnd.NO_ROOM)
            del self._replays[oldest]
        return replay

    async def _read(self, replay: _Replay, attribution: Attribution) -> None:
        """Reads the captures; their size is counted even if the caller has disconnected."""
        attempt = attribution.attempt
        try:
            calls = await self._lost.read(attribution)
        except FulmenError as error:
            _log.warning("lost_attempt_not_read", attempt=attempt, reason=error.reason)
            self._end(attempt, replay, ReplayEnd.UNAVAILABLE)
            return
        finally:
            replay.reading = None
        if replay.ended is not None:
            return  # forgotten meanwhile
        if calls.is_over:
            self._end(attempt, replay, ReplayEnd.NOTHING)
        else:
            self._make_room(calls.size_bytes)
            replay.calls = calls
            self.size_bytes += calls.size_bytes

    def _make_room(self, size_bytes: int) -> None:
        """Ends replays that have not been used for longest, such as those of attempts that were lost again."""
        for attempt, replay in self._replays.items():
            if self.size_bytes + size_bytes <= self._max_bytes:
                return
            if replay.calls is not None:
                self._end(attempt, replay, ReplayEnd.NO_ROOM)

    def _take(self, replay: _Replay, dispatch: Dispatch, model: str) -> CapturedCall | None:
        calls = replay.calls
        digest = request_digest(model, dispatch.plan.fields)
        if calls is None or digest is None or (calls.count(digest) > 1 and not self._is_alone()):
            return None
        before_bytes = calls.size_bytes
        captured = calls.take(digest)
        self.size_bytes -= before_bytes - calls.size_bytes
        # A route that leads to another policy by now: its tokens would be those of the old one.
        return captured if captured is not None and captured.policy == dispatch.choice.target.policy else None

    def _end(self, attempt: str, replay: _Replay, end: ReplayEnd) -> None:
        if replay.ended is not None:
            return
        replay.ended = end
        if replay.calls is not None:
            self.size_bytes -= replay.calls.size_bytes
            replay.calls = None
        self._metrics.ended(end)
        _log.info("replay_ended", attempt=attempt, end=end.value)


def _end_without(calls: CallSequence) -> ReplayEnd:
    return ReplayEnd.COMPLETE if calls.is_over else ReplayEnd.DIVERGED


def _answer_of(captured: CapturedCall) -> bytes | None:
    """Returns the answer; None if its record is damaged."""
    try:
        return captured.answer()
    except (*UNREADABLE, AttributeError, KeyError, TypeError, ValueError):
        return None
