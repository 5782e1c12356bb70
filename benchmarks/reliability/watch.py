"""Looks at a stack from outside while it is harmed: who noticed first, and when work went on."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.reliability.plan import Victim
from benchmarks.reliability.stand import Stand, StandFailed
from benchmarks.reliability.workload import Workload
from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import FulmenError
from tests.support.algorithm.runs import FINAL_RUN_STATES

__all__ = ["Progress", "Watch"]

INTERVAL_S: Final = 0.1
READINESS_INTERVAL_S: Final = 0.3
"""A probe opens a connection to each service, which costs them and this machine."""
RPC_LIMIT_S: Final = 1.0
FINISHED: Final = """
select count(*) from rollout_end e join training_run t on t.id = e.run_id where t.name = $1 and e.state <> 6
"""
LOST_LEASES: Final = """
select count(*) from attempt a join rollout r on r.id = a.rollout_id join training_run t on t.id = r.run_id
where t.name = $1 and a.state = 3
"""
# Levels as structlog prints them, plain, coloured or as JSON; and PostgreSQL's words, but for FATAL, which clients cause too.
COMPLAINT: Final = re.compile(
    r"\[\s*(?:\x1b\[[0-9;]*m)*(warning|error|critical)|\"level\": ?\"(warning|error|critical)"
    r"|\"severity\": ?\"(warning|error)|PANIC: |terminated by signal|shutdown request|No space left"
)


@dataclass(slots=True)
class Progress:
    """How far a run has come, each with the time at which it was first seen.

    Attributes:
        finished: Times and numbers of finished rollouts; only changes are kept.
        steps: Times and numbers of training steps.
        state: The last known state of the run.
        failure: Its message, if it has failed.
    """

    finished: list[tuple[float, int]] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    state: int = 0
    failure: str = ""

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.state in FINAL_RUN_STATES

    @property
    def succeeded(self) -> bool:
        """Whether the run did all its steps."""
        return self.state == training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED

    @property
    def step(self) -> int:
        """The last step that was seen."""
        return self.steps[-1][1] if self.steps else 0


class Watch:
    """Polls everything ten times a second, each part with a deadline of its own."""

    def __init__(self, stand: Stand, workload: Workload, run: str, *, victims: tuple[Victim, ...]) -> None:
        """Looks at nothing yet.

        Args:
            stand: The stack.
            workload: Opens connections.
            run: `projects/{project}/trainingRuns/{id}`.
            victims: Who is harmed: that a held process does not answer this program is no sign that anything noticed.
        """
        self._stand, self._workload, self._run, self._victims = stand, workload, run, victims
        self._signs: dict[str, object] = {}
        self._logs: dict[Path, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.progress = Progress()
        self.blind: list[str] = []
        """What this program could not see any more, in words; known when the watch has ended."""
        self.noticed: tuple[float, str] | None = None

    async def __aenter__(self) -> Watch:
        for look in (self._look_at_rollouts, self._look_at_steps):
            self._tasks.append(asyncio.create_task(look(), name=look.__name__))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for task, end in zip(self._tasks, await asyncio.gather(*self._tasks, return_exceptions=True), strict=True):
            if isinstance(end, Exception):
                # What was not looked at any more must not read as "never".
                self.blind.append(f"the matrix was blind: {task.get_name()}: {type(end).__name__}: {end}"[:300])

    async def begin_fault(self) -> None:
        """Remembers how everything is; whatever differs from now on is a sign."""
        self._signs = {**self._record_signs(), **await self._readiness_signs()}
        self._logs = {path: path.stat().st_size for path in self._log_files() if path.exists()}
        for look in (self._look_for_signs, self._look_at_readiness):
            self._tasks.append(asyncio.create_task(look(), name=look.__name__))

    def end_fault(self) -> None:
        """Stops looking for signs: what comes once work has gone on is of something else."""
        self._is_over = True

    async def _look_at_rollouts(self) -> None:
        while True:
            try:
                rows = await self._stand.query(FINISHED, self._run)
                self._note(self.progress.finished, int(rows[0][0]))
            except OSError:
                pass  # PostgreSQL is harmed: nothing finishes meanwhile.
            await asyncio.sleep(INTERVAL_S)

    async def _look_at_steps(self) -> None:
        while True:
            try:
                async with self._workload.client() as client:
                    while not self.progress.ended:
                        request = training_run_service_pb2.GetTrainingRunRequest(name=self._run)
                        answer = await client.training_runs.GetTrainingRun(request, timeout=RPC_LIMIT_S)
                        run = answer.training_run
                        self.progress.state, self.progress.failure = run.state, run.failure_message
                        self._note(self.progress.steps, run.step)
                        await asyncio.sleep(INTERVAL_S)
                return
            except (FulmenError, OSError, StandFailed):
                await asyncio.sleep(INTERVAL_S)

    def _note(self, seen: list[tuple[float, int]], number: int) -> None:
        # After a restart a run goes back to its checkpoint: steps that are done again count.
        if not seen or seen[-1][1] != number:
            seen.append((time.monotonic(), number))

    async def _look_for_signs(self) -> None:
        while self.noticed is None and not self._is_over:
            found = next((name for name, value in self._record_signs().items() if self._signs.get(name) != value), "")
            self._notice(found or self._complaint())
            await asyncio.sleep(INTERVAL_S / 2)

    async def _look_at_readiness(self) -> None:
        while self.noticed is None and not self._is_over:
            now = await self._readiness_signs()
            self._notice(next((name for name, value in now.items() if self._signs.get(name) != value), ""))
            await asyncio.sleep(READINESS_INTERVAL_S)

    def _notice(self, sign: str) -> None:
        if sign and self.noticed is None:
            self.noticed = (time.monotonic(), sign)

    def _record_signs(self) -> dict[str, object]:
        record = self._stand.record()
        if record is None:
            return {}
        signs: dict[str, object] = {
            f"record of {each.name}": (each.state, each.pid, each.restarts) for each in record.services
        }
        return {**signs, "record of the stack": (record.state, record.supervisor_pid)}

    async def _readiness_signs(self) -> dict[str, object]:
        answers = await self._stand.readiness(but=self._victims)
        return {f"readiness of {name}": serves for name, serves in answers.items()}

    def _log_files(self) -> list[Path]:
        run = self._run.rpartition("/")[2]
        notices = self._stand.state.path / "algorithm" / "runs" / "default" / run / "events.jsonl"
        return [*self._stand.state.logs.glob("*.log"), self._stand.state.database / "server.log", notices]

    def _complaint(self) -> str:
        """Returns whose log complains since the fault began; empty if none does."""
        for path in self._log_files():
            try:
                with path.open("rb") as file:
                    file.seek(self._logs.get(path, 0))
                    lines, _, _ = file.read().rpartition(b"\n")
                self._logs[path] = self._logs.get(path, 0) + len(lines)
                text = lines.decode(errors="replace")
            except OSError:
                continue
            if COMPLAINT.search(text):
                return {"events": "notice of the run", "server": "log of database"}.get(
                    path.stem, f"log of {path.stem}"
                )
        return ""
