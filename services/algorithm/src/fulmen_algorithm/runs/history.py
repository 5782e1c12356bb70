"""Background role: sends what runs measured, and their notices, to the store, where they stay readable without this service.

The event log is authoritative. The store knows which event it has last, so a restarted service, or the next owner of a run,
continues there. An unavailable store delays no training.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import structlog

from fulmen.errors import ArgumentInvalid, FulmenError, RunLeaseLost
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.failure import AWAY
from fulmen_algorithm.runs.ports import RunFence, RunHistory
from fulmen_algorithm.runs.registry import RunRegistry

_log = structlog.get_logger()

REFUSED_OR_AWAY: tuple[type[Exception], ...] = (FulmenError, *AWAY)
INTERVAL_S = 0.25
RETRY_S = 2.0
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
            try:
                await self._deliver(entry)
            except RunLeaseLost:
                self._sent[entry.run.name] = _Sent(epoch=entry.files.epoch, sequence=0, branches=0, is_refused=True)
            except REFUSED_OR_AWAY as error:
                _log.warning("run_history_not_delivered", run=entry.run.name, reason=type(error).__name__)
                return False
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
        told = [event for event in events if event.run is None or event.sequence in rollbacks]
        try:
            if told:
                await self._history.append(fence, told, rollbacks=rollbacks)
        except ArgumentInvalid as error:
            # Sent again it would be refused again, and hold up all that follows.
            _log.error("run_history_refused", run=fence.training_run, reason=str(error), events=len(told))
        sent.sequence = events[-1].sequence
        sent.branches += len(rollbacks)


def _rollbacks(events: Sequence[Event], branches: int) -> Iterator[tuple[int, int]]:
    """Yields the events that rolled a run back, by sequence, each with the step to which it did."""
    for event in events:
        if event.run is not None and len(event.run.branch_points) > branches:
            branches = len(event.run.branch_points)
            yield event.sequence, event.run.step
