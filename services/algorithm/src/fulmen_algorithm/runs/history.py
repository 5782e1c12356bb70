"""Background role: sends what runs measured, and their notices, to the store, where they stay readable without this service.

The event log is authoritative. The store knows which event it has last, so a restarted service, or the next owner of a run,
continues there. An unavailable store delays no training, and a run whose events cannot be read or are refused no other run.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from fulmen.errors import ArgumentInvalid, DeadlineExceeded, FulmenError, RunLeaseLost, Unavailable
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.ports import RunFence, RunHistory
from fulmen_algorithm.runs.registry import RunRegistry

_log = structlog.get_logger()

AWAY: tuple[type[Exception], ...] = (Unavailable, DeadlineExceeded, TimeoutError)
OF_ONE_RUN: tuple[type[Exception], ...] = (FulmenError, OSError, ValueError, LookupError)
"""A refusal, such as that of a project that was deleted; or events on disk that are damaged or out of reach."""
INTERVAL_S = 0.25
RETRY_S = 2.0
RETRY_ONE_S = 30.0
LAST_S = 2.0
"""Time for what is left when the service stops."""
EVENTS_AT_ONCE = 200


@dataclass(slots=True, kw_only=True)
class _Sent:
    """What the store has of a run.

    Attributes:
        epoch: Epoch under which it was sent.
        sequence: The last event.
        branches: Number of rollbacks up to it.
        is_refused: Whether the store takes no more under this epoch.
    """

    epoch: int
    sequence: int
    branches: int
    is_refused: bool = False


class HistoryDelivery:
    """Delivers the events of the runs that this service wrote last."""

    def __init__(self, runs: RunRegistry, history: RunHistory) -> None:
        self._runs = runs
        self._history = history
        self._sent: dict[str, _Sent] = {}
        self._later: dict[str, float] = {}

    async def run(self) -> None:
        """Delivers until cancelled, and then once more."""
        try:
            while True:
                answered = await self.deliver()
                await asyncio.sleep(INTERVAL_S if answered else RETRY_S)
        finally:
            try:
                async with asyncio.timeout(LAST_S):
                    await self.deliver()
            except TimeoutError:
                _log.warning("run_history_not_delivered", reason="the store did not answer in time")

    async def deliver(self) -> bool:
        """Sends what the store does not have; returns False if it did not answer."""
        for entry in self._runs.entries():
            name = entry.run.name
            if self._later.get(name, 0.0) > time.monotonic():
                continue
            self._later.pop(name, None)
            try:
                await self._deliver(entry)
            except RunLeaseLost:
                self._sent[name] = _Sent(epoch=entry.files.epoch, sequence=0, branches=0, is_refused=True)
            except AWAY as error:
                _log.warning("run_history_not_delivered", run=name, reason=type(error).__name__)
                return False
            except OF_ONE_RUN as error:
                _log.warning("run_history_not_delivered", run=name, reason=type(error).__name__)
                self._later[name] = time.monotonic() + RETRY_ONE_S
        return True

    async def _deliver(self, entry: Entry) -> None:
        if not self._runs.is_own(entry):
            self._sent.pop(entry.run.name, None)
            return
        sent = self._sent.get(entry.run.name)
        if sent is None or sent.epoch != entry.files.epoch:
            sent = await self._begun(entry)
        while not sent.is_refused and entry.events.last_sequence > sent.sequence:
            events = await asyncio.to_thread(entry.events.piece, sent.sequence, EVENTS_AT_ONCE)
            await self._send(RunFence(training_run=entry.run.name, epoch=sent.epoch), events, sent)

    async def _begun(self, entry: Entry) -> _Sent:
        fence = RunFence(training_run=entry.run.name, epoch=entry.files.epoch)
        sequence = await self._history.append(fence, [], rollbacks={})
        branches = 0
        if sequence < entry.events.last_sequence:
            branches = await asyncio.to_thread(entry.events.branches_at, sequence)
        sent = _Sent(epoch=fence.epoch, sequence=sequence, branches=branches)
        self._sent[entry.run.name] = sent
        return sent

    async def _send(self, fence: RunFence, events: Sequence[Event], sent: _Sent) -> None:
        rollbacks = dict(_rollbacks(events, sent.branches))
        await self._append(
            fence, [event for event in events if event.run is None or event.sequence in rollbacks], rollbacks
        )
        sent.sequence = events[-1].sequence
        sent.branches += len(rollbacks)

    async def _append(self, fence: RunFence, events: Sequence[Event], rollbacks: Mapping[int, int]) -> None:
        """Appends events, without those that the store refuses: sent again they would hold up all that follows."""
        if not events:
            return
        try:
            await self._history.append(fence, events, rollbacks=rollbacks)
        except ArgumentInvalid as error:
            if len(events) == 1:
                _log.error(
                    "run_history_refused", run=fence.training_run, reason=str(error), sequence=events[0].sequence
                )
                return
            middle = len(events) // 2
            await self._append(fence, events[:middle], rollbacks)
            await self._append(fence, events[middle:], rollbacks)


def _rollbacks(events: Sequence[Event], branches: int) -> Iterator[tuple[int, int]]:
    """Yields the events that rolled a run back, by sequence, each with the step to which it did."""
    for event in events:
        if event.run is not None and len(event.run.branch_points) > branches:
            branches = len(event.run.branch_points)
            yield event.sequence, event.run.step
