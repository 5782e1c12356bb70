"""Python agents and graders in child processes: one attempt at a time in each, children used again.

Invariant: when a call returns or raises, its child waits for the next attempt of the same program or is gone with all
that it started; a child is given the key of an attempt with that attempt, never before, and forgets it after.
"""

import asyncio
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import structlog

from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.command.limits import allowance, measure
from fulmen_runner.agents.command.process import PIPE_DEADLINE_S, Process, ProcessLimits
from fulmen_runner.agents.environment import PLACEHOLDER_KEY, Endpoints
from fulmen_runner.agents.python.child_frames import Document, MessageTooLarge, encode, receive
from fulmen_runner.agents.specification import Limits
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import MAX_MESSAGE_BYTES

_MODULE = "fulmen_runner.agents.python.child_main"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProgram:
    """What a child runs; children are used again only for the same.

    Attributes:
        target: `file.py:name` or `package.module:name`.
        directory: The unpacked bundle, which is the working directory; None for the runner's.
        grading: True for a grader, False for an agent.
        graded: True for an agent whose outcome a grader gets.
        environment: What its publisher gave it, without templates; there already while its modules are imported.
        limits: What it may use.
    """

    target: str
    directory: Path | None
    grading: bool
    graded: bool
    environment: tuple[tuple[str, str], ...]
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPolicy:
    """How long children live.

    Attributes:
        attempts_each: How many attempts a child runs; 1 gives each attempt a new one.
        idle_count: How many may wait for work, of all programs together.
        idle_s: How long one waits for work before it is ended, in seconds.
    """

    attempts_each: int
    idle_count: int
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildHost:
    """What all children of a runner share.

    Attributes:
        inherited: The runner's variables that they get.
        flush_s: How long they wait for their spans at the end of an attempt, seconds.
        output_allowed_bytes: A child that writes more in an attempt is killed.
        limits: The most that any of them may use.
    """

    guardian: Guardian
    inherited: Mapping[str, str]
    endpoints: Endpoints
    flush_s: float
    output_allowed_bytes: int
    limits: Limits


class Child:
    """One child process."""

    def __init__(self, process: Process, streams: "_Streams") -> None:
        self.attempt_count = 0
        self.idle_since_s = 0.0
        self._process = process
        self._reader, self._writer = streams

    @classmethod
    async def start(cls, program: ChildProgram, host: ChildHost) -> Self:
        """Starts a child and waits until it has loaded its program.

        Raises:
            AgentFailed: If the program cannot be loaded, or the child cannot be started.
        """
        allowed = allowance(
            program.limits, memory_bytes=host.limits.memory_bytes, process_count=host.limits.process_count
        )
        limits = ProcessLimits(
            stdout_kept_bytes=MAX_MESSAGE_BYTES,
            stderr_kept_bytes=MAX_MESSAGE_BYTES,
            output_allowed_bytes=host.output_allowed_bytes,
            allowance=allowed,
        )
        environment = {**host.inherited, **dict(program.environment), **host.endpoints.environment(PLACEHOLDER_KEY)}
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await Process.start(
                    # Without its working directory on the import path: a bundle may have a `numbers.py` or `types.py`.
                    (sys.executable, "-P", "-m", _MODULE),
                    cwd=program.directory,
                    environment=environment,
                    stdin=theirs.fileno(),
                    limits=limits,
                    guardian=host.guardian,
                )
            except (OSError, ValueError) as error:
                ours.close()
                raise AgentFailed(f"A process for the agent cannot be started: {error}") from None
            except BaseException:
                ours.close()
                raise
        child = cls(process, await asyncio.open_unix_connection(sock=ours))
        setup = {
            "target": program.target,
            "directory": str(program.directory or ""),
            "grading": program.grading,
            "graded": program.graded,
            "endpoints": asdict(host.endpoints),
            "flush_s": host.flush_s,
        }
        try:
            loaded = await child._exchange(encode(setup))
            if "error" in loaded:
                raise AgentFailed(str(loaded["error"]))
        except BaseException:
            await child.end()
            raise
        return child

    async def call(self, request: Document, body: bytes) -> Document:
        """Runs one attempt and returns the child's answer; being cancelled, the child is still to be ended.

        Raises:
            AgentFailed: If the agent fails, or the child ends.
        """
        self.attempt_count += 1
        self._process.watch.begin()
        return await self._exchange(encode(request, body))

    @property
    def is_alive(self) -> bool:
        """True while it has not ended."""
        return not (self._process.kept.exited.done() or self._process.breach.done())

    async def is_alone(self) -> bool:
        """Tells whether nothing that it started is alive. Where there is no /proc, it cannot be told: False."""
        if not Path("/proc/self/stat").exists():
            return False
        keeper = self._process.kept.keeper
        return len((await asyncio.to_thread(measure, (keeper,)))[keeper].processes) == 1

    async def end(self) -> None:
        """Ends it with all that it started."""
        try:
            await self._process.end()
        finally:
            self._writer.close()

    async def _exchange(self, message: bytes) -> Document:
        process = self._process
        self._writer.write(message)
        answer = asyncio.ensure_future(receive(self._reader))
        try:
            ends = (process.watch.flooded, process.breach, process.kept.exited)
            await asyncio.wait((answer, *ends), return_when=asyncio.FIRST_COMPLETED)
            if process.watch.flooded.done() or process.breach.done():
                raise AgentFailed(await self._how_it_ended())
            # What it forked may keep the connection open after its own end.
            async with asyncio.timeout(None if answer.done() else PIPE_DEADLINE_S):
                document, _ = await answer
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            raise AgentFailed(await self._how_it_ended()) from None
        except MessageTooLarge:
            raise AgentFailed("The agent's process answered with more than is allowed.") from None
        except ValueError:
            raise AgentFailed("The agent's process answered with something that is no answer.") from None
        finally:
            answer.cancel()
        return document

    async def _how_it_ended(self) -> str:
        closed = not await self._ended_by_itself()
        await self._process.end()
        if closed:
            return "The agent's process closed its connection to the runner."
        result = self._process.result()
        what = result.failure or f"exited with status 0.\n{result.stderr.decode(errors='replace')}".rstrip()
        return f"The agent's process {what}" if result.breach else f"The agent's process ended too soon: it {what}"

    async def _ended_by_itself(self) -> bool:
        ends = (self._process.watch.flooded, self._process.breach, self._process.kept.exited)
        done, _ = await asyncio.wait(ends, timeout=PIPE_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)


@dataclass(slots=True, kw_only=True)
class Children:
    """The children of a runner."""

    host: ChildHost
    policy: ChildPolicy
    _idle: "OrderedDict[Child, ChildProgram]" = field(default_factory=OrderedDict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    async def call(self, program: ChildProgram, request: Document, body: bytes) -> Document:
        """Runs one attempt in a child that waits for it, or in a new one; being cancelled, it ends the child.

        Raises:
            AgentFailed: If the agent fails, or its process ends.
        """
        child = self._take(program) or await self._start(program)
        keep = False
        try:
            answer = await child.call(request, body)
            keep = (
                answer.get("reusable") is True
                and child.attempt_count < self.policy.attempts_each
                and await child.is_alone()
            )
        finally:
            # Also of an attempt that is cancelled in between: nobody else knows the child.
            if keep:
                self._put(child, program)
            else:
                await child.end()
        return answer

    async def close(self) -> None:
        """Ends all that wait."""
        while self._idle:
            self._end_later(self._idle.popitem()[0])
        if self._ending:
            await asyncio.wait(set(self._ending))

    async def _start(self, program: ChildProgram) -> Child:
        child = await Child.start(program, self.host)
        _log.debug("child_started", target=program.target)
        return child

    def _take(self, program: ChildProgram) -> Child | None:
        for child in [child for child, known in reversed(self._idle.items()) if known == program]:
            del self._idle[child]
            if child.is_alive:
                return child
            self._end_later(child)
        return None

    def _put(self, child: Child, program: ChildProgram) -> None:
        child.idle_since_s = time.monotonic()
        self._idle[child] = program
        asyncio.get_running_loop().call_later(self.policy.idle_s, self._end_late)
        while len(self._idle) > self.policy.idle_count:
            self._end_later(self._idle.popitem(last=False)[0])

    def _end_late(self) -> None:
        late_s = time.monotonic() - self.policy.idle_s
        for child in list(self._idle):
            if not child.is_alive or child.idle_since_s <= late_s:
                del self._idle[child]
                self._end_later(child)

    def _end_later(self, child: Child) -> None:
        task = asyncio.create_task(child.end(), name="end child")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
