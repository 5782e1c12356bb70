"""The processes that hold trainers: one for the trainers of a project with adapters on the same base, one for each other.

Invariant: at most `max_processes` at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from fulmen.errors import QuotaExceeded
from fulmen_algorithm.loops.calls import Call, Close, decode_result, encode
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers.processes import Group, GroupOptions, RankEnded, RankRefused, start_group

MODULE = "fulmen_algorithm.loops.process"
RETRY_S = 5.0
TRIES = 3
_log = structlog.get_logger()
Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class LoopProcess:
    """A process. Its calls are carried out one after the other, in order of arrival."""

    key: str
    group: Group
    call_deadline_s: float
    trainers: set[str] = field(default_factory=set)
    lost: str = ""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pid(self) -> int:
        """Process id."""
        return self.group.links[0].hello.pid

    async def ask(self, call: Call, kind: type[Result]) -> Result:
        """Sends a call and waits for its result. The caller must not be cancelled meanwhile.

        Raises:
            TrainerLost: if the process has ended, or does not answer in time.
            RunFailed, ValueError, OSError: if it refuses the call, which then changed nothing.
        """
        async with self._turn:
            if self.lost:
                raise TrainerLost(self.lost)
            try:
                async with asyncio.timeout(self.call_deadline_s):
                    answer = await self.group.links[0].ask(encode(call))
            except RankRefused as error:
                raise error.error from error
            except RankEnded as error:
                self.lost = "The process of the trainer has ended."
                _log.warning("trainer_process_ended", trainer=call.trainer, reason=str(error))
            except TimeoutError:
                self.lost = f"The process of the trainer did not answer within {self.call_deadline_s:.0f} s."
            except BaseException:
                self.lost = "A call to the process was interrupted."
                raise
            if self.lost:
                await self.group.end()
                raise TrainerLost(self.lost)
        return await asyncio.to_thread(decode_result, answer.result, kind)

    async def end(self) -> None:
        """Ends it."""
        async with self._turn:
            self.lost = self.lost or "The process of the trainer was stopped."
            await self.group.end()


class LoopProcesses:
    """All processes."""

    def __init__(self, options: GroupOptions, *, max_processes: int) -> None:
        """Starts none yet."""
        self._options = options
        self._max_processes = max_processes
        self._running: dict[str, LoopProcess] = {}
        self._starting = asyncio.Lock()

    async def place(self, key: str, trainer: str, *, make_room: Callable[[], Awaitable[bool]]) -> LoopProcess:
        """Returns the process of a key, started if need be, in which a trainer then has its place.

        Args:
            key: Equal for trainers that share a process.
            trainer: Name of the trainer.
            make_room: Unloads trainers that are not in use; returns whether any was.

        Raises:
            QuotaExceeded: if all processes are in use.
            TrainerLost: if it does not start.
        """
        for _ in range(TRIES):
            async with self._starting:
                found = self._running.get(key)
                is_known = found is not None
                if (found is None or found.lost) and (is_known or len(self._running) < self._max_processes):
                    group = await start_group(MODULE, 1, self._options)
                    found = LoopProcess(key=key, group=group, call_deadline_s=self._options.call_deadline_s)
                    self._running[key] = found
                if found is not None:
                    found.trainers.add(trainer)
                    return found
            # Not under the lock: a trainer that is unloaded may be about to ask for a place itself.
            if not await make_room():
                break
        raise QuotaExceeded(
            f"All {self._max_processes} processes of trainers are in use (max_trainer_processes). Retry after the delay.",
            quota="trainer_processes",
            retry_after_s=RETRY_S,
        )

    async def leave(self, process: LoopProcess, trainer: str) -> None:
        """Removes a trainer from its process, which ends with its last one."""
        if trainer not in process.trainers:
            return
        process.trainers.discard(trainer)
        if process.trainers and not process.lost:
            await process.ask(Close(trainer=trainer), object)
            return
        if self._running.get(process.key) is process and not process.trainers:
            del self._running[process.key]
        if not process.trainers:
            await process.end()
