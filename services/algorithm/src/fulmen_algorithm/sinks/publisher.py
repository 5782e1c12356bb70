"""Background role: copies the metrics of every run from its event log to the metric sinks.

The event log is authoritative; an unavailable or broken sink never delays training. The position of each run is stored
in its folder, and a restarted service resumes there: metrics from just before a crash may be written twice, but none
are lost. A sink that never answers is abandoned: it blocks neither other sinks and runs nor the end of the service.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from fulmen_algorithm.persistence.files import replace_file
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.sinks.sink import MetricSink, OpenSink

_log = structlog.get_logger()

INTERVAL_S = 2.0
CALL_DEADLINE_S = 300.0
"""Longer than the libraries' own retries."""
POSITION_FILE = "metrics.json"
Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class _Carried:
    """One run's sinks and the last event written to them."""

    folder: Path
    sequence: int
    sinks: dict[str, MetricSink] = field(default_factory=dict)
    opened: bool = False


class MetricPublisher:
    """Publishes metrics every two seconds."""

    def __init__(
        self, runs: RunRegistry, sinks: Mapping[str, OpenSink], *, deadline_s: float = CALL_DEADLINE_S
    ) -> None:
        """`deadline_s` is the timeout of one call of a sink, in seconds."""
        self._runs = runs
        self._openers = sinks
        self._deadline_s = deadline_s
        self._carried: dict[str, _Carried] = {}

    async def run(self) -> None:
        """Publishes until cancelled, and then once more."""
        try:
            while True:
                await self.carry()
                await asyncio.sleep(INTERVAL_S)
        finally:
            await self.carry()
            for name, carried in self._carried.items():
                await self._close(self._runs.entry(name), carried)

    async def carry(self) -> None:
        """Writes new metrics to every sink."""
        for entry in self._runs.entries():
            if not self._runs.is_own(entry):
                self._carried.pop(entry.run.name, None)
                continue
            carried = self._carried.get(entry.run.name) or await self._begun(entry)
            try:
                if entry.events.last_sequence > carried.sequence:
                    await self._write(entry, carried)
            except (OSError, ValueError, LookupError) as error:
                # Its events on disk are damaged or out of reach: other runs go on, and this one when they are back.
                _log.warning("metrics_not_read", run=entry.run.name, error=str(error))
                continue
            if entry.run.state.final and carried.sinks:
                await self._close(entry, carried)

    async def _begun(self, entry: Entry) -> _Carried:
        position = await asyncio.to_thread(_position, entry.files.journal / POSITION_FILE)
        carried = _Carried(folder=entry.files.folder, sequence=position)
        self._carried[entry.run.name] = carried
        return carried

    async def _write(self, entry: Entry, carried: _Carried) -> None:
        last = entry.events.last_sequence
        # In a thread: the events of an ended run are read from disk.
        steps = await asyncio.to_thread(entry.events.steps_between, carried.sequence, last)
        if steps:
            await self._open(entry, carried)
            for name, sink in list(carried.sinks.items()):
                if await self._guarded(entry, name, partial(_written, sink, steps)) is None:
                    del carried.sinks[name]
        carried.sequence = last
        try:
            file, content = entry.files.journal / POSITION_FILE, json.dumps({"sequence": last}).encode()
            await asyncio.to_thread(replace_file, file, content)
        except OSError as error:
            _log.warning("metric_position_not_stored", run=entry.run.name, error=str(error))

    async def _open(self, entry: Entry, carried: _Carried) -> None:
        if carried.opened:
            return
        carried.opened = True
        settings = json.loads(entry.run.settings_json)
        for name, opener in self._openers.items():
            sink = await self._guarded(entry, name, partial(opener, entry.run, carried.folder, settings))
            if sink is not None:
                carried.sinks[name] = sink

    async def _close(self, entry: Entry, carried: _Carried) -> None:
        sinks, carried.sinks, carried.opened = carried.sinks, {}, False
        for name, sink in sinks.items():
            await self._guarded(entry, name, partial(sink.close, entry.run))

    async def _guarded(self, entry: Entry, name: str, work: Callable[[], Result]) -> Result | None:
        """Calls a sink in a thread; None if it failed or did not answer."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await _in_own_thread(work, name=f"sink-{name}")
        except Exception:  # noqa: BLE001  (its library may raise anything, which must not end a run)
            self._gave_up(entry, name)
            return None

    def _gave_up(self, entry: Entry, name: str) -> None:
        _log.exception("metric_sink_failed", run=entry.run.name, sink=name)
        if not entry.run.state.final:
            entry.events.notify("warning", f"{name} accepts no more metrics of this run; see the service's log.")


def _position(path: Path) -> int:
    """Returns the last event that was written; 0 if none was, or that cannot be read: all are written again then."""
    try:
        return int(json.loads(path.read_bytes())["sequence"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, LookupError, TypeError) as error:
        _log.warning("metric_position_not_read", path=str(path), error=str(error))
        return 0


async def _in_own_thread(work: Callable[[], Result], *, name: str) -> Result:
    """Calls a function in a daemon thread outside of the shared pool."""
    answer: Future[Result] = Future()
    answer.set_running_or_notify_cancel()  # cannot be cancelled from now on

    def call() -> None:
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001  (raised again where it is waited for)
            answer.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)


def _written(sink: MetricSink, steps: list[StepMetrics]) -> bool:
    sink.write(steps)
    return True
