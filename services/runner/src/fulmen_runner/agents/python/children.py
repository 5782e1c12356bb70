"""Python agents and graders in child processes, which run one attempt at a time and are reused.

Invariant: when a call returns or raises, its child is either idle, waiting for another attempt of the same program, or
dead with all its descendants. A child knows the key of its current attempt only.
"""

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import structlog

from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.command.limits import Allowance, allowance, measure
from fulmen_runner.agents.command.process import PIPE_TIMEOUT_S, Process, ProcessLimits
from fulmen_runner.agents.environment import PLACEHOLDER_KEY, Endpoints
from fulmen_runner.agents.isolation import AgentIsolation, give
from fulmen_runner.agents.python.child_frames import Document, MessageTooLarge, encode, receive
from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.venvs.own_python import Venv
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import MAX_MESSAGE_BYTES, cut_at_front
from fulmen_runner.attempts.printed import MAX_PRINTED_BYTES, PrintedTails
from fulmen_runner.attempts.workspace import ENTERED_BY_ALL, Files
from fulmen_service_kit.isolation import launch as launching
from fulmen_service_kit.isolation.levels import Isolation
from fulmen_service_kit.isolation.trees import delete_tree

_MODULE = "fulmen_runner.agents.python.child_main"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProgram:
    """The callable that a child runs; a child is reused only for an equal program.

    Attributes:
        target: `file.py:name` or `package.module:name`.
        directory: Working directory: the unpacked bundle; None for the runner's.
        grading: True for a grader, False for an agent.
        graded: True for an agent whose outcome is passed to a grader.
        environment: The specification's variables without placeholders, set before its modules are imported.
        limits: Resource limits.
        level: Its isolation; `trusted` only in a virtual environment.
        folder: Parent of its attempts' files.
        venv: Its virtual environment; None for the runner's Python.
    """

    target: str
    directory: Path | None
    grading: bool
    graded: bool
    environment: tuple[tuple[str, str], ...]
    limits: Limits
    level: Isolation
    folder: Path
    venv: Venv | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPolicy:
    """Reuse of children.

    Attributes:
        max_attempts: Attempts per child; 1 to start a new child for each attempt.
        max_idle: Number of idle children over all programs.
        idle_timeout_s: Time after which an idle child is ended, in seconds.
    """

    max_attempts: int
    max_idle: int
    idle_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildHost:
    """Configuration shared by all children of a runner.

    Attributes:
        guardian: Starts the processes.
        inherited: Variables inherited from the runner.
        endpoints: Addresses for model calls and spans.
        flush_s: Timeout for flushing an attempt's spans, in seconds.
        output_allowed_bytes: Output per attempt above which a child is killed.
        limits: Upper bounds of the programs' limits.
        disk_bytes: Limit of an attempt's files; 0 for no limit.
        isolation: Isolates them.
    """

    guardian: Guardian
    inherited: Mapping[str, str]
    endpoints: Endpoints
    flush_s: float
    output_allowed_bytes: int
    limits: Limits
    disk_bytes: int = 0
    isolation: AgentIsolation = field(default_factory=AgentIsolation)


class Child:
    """One child process."""

    def __init__(self, process: Process, streams: "_Streams", *, home: Path, uid: int | None) -> None:
        """Use `start`.

        Args:
            process: The process.
            streams: Connection to it.
            home: Folder of its temporary files, deleted with it.
            uid: Its user; None for the runner's.
        """
        self.attempt_count = 0
        self.idle_since_s = 0.0
        self._process = process
        self._reader, self._writer = streams
        self._home, self._uid = home, uid
        self._own_processes = 1
        process.watch_folders(home)

    @classmethod
    async def start(cls, program: ChildProgram, host: ChildHost) -> Self:
        """Starts a child and waits until it has loaded its program.

        Raises:
            AgentFailed: If the child cannot be started or cannot load the program.
        """
        allowed = allowance(
            program.limits,
            memory_bytes=host.limits.memory_bytes,
            process_count=host.limits.process_count,
            disk_bytes=host.disk_bytes,
        )
        home = await asyncio.to_thread(_new_home, program.folder)
        with ExitStack() as undo:
            undo.callback(delete_tree, home)
            child = await cls._started(program, host, allowed, home)
            undo.pop_all()
        setup = {
            "target": program.target,
            "directory": str(program.directory or ""),
            "grading": program.grading,
            "graded": program.graded,
            "endpoints": asdict(host.endpoints),
            "flush_s": host.flush_s,
        }
        try:
            loaded = await child._request(encode(setup))
            if "error" in loaded:
                raise AgentFailed(str(loaded["error"]))
            if loaded.get("untraced"):
                _log.warning("agent_is_not_traced", target=program.target, reason=str(loaded["untraced"])[:200])
            if program.level is Isolation.SANDBOX:
                child._own_processes = await child._process_count()
        except BaseException:
            await child.end()
            raise
        return child

    @classmethod
    async def _started(cls, program: ChildProgram, host: ChildHost, allowed: Allowance, home: Path) -> Self:
        folder = program.directory or (home if program.level is Isolation.SANDBOX else Path.cwd())
        # -P: modules of the bundle such as `numbers.py` must not shadow the standard library here.
        argv: tuple[str, ...] = (sys.executable, "-P", "-m", _MODULE)
        readable: tuple[Path, ...] = (folder,)
        if program.venv is not None:
            argv, readable = program.venv.child_argv, (folder, *program.venv.readable)
        launch = await host.isolation.launch(
            argv,
            program.level,
            files=launching.Files(readable=readable, writable=(program.folder,), folder=folder),
            allowance=allowed,
            owned=home,
        )
        environment = {**host.inherited, **dict(program.environment), **host.endpoints.environment(PLACEHOLDER_KEY)}
        if program.venv is not None:
            environment |= program.venv.variables(environment)
        if launch.needs_home:
            environment |= {"HOME": str(home), "TMPDIR": str(home)}
        limits = ProcessLimits(
            stdout_kept_bytes=MAX_PRINTED_BYTES,
            stderr_kept_bytes=MAX_PRINTED_BYTES,
            output_allowed_bytes=host.output_allowed_bytes,
            allowance=allowed,
        )
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await Process.start(
                    launch,
                    cwd=folder,
                    environment=environment,
                    stdin=theirs.fileno(),
                    limits=limits,
                    guardian=host.guardian,
                )
            except (OSError, ValueError) as error:
                ours.close()
                raise AgentFailed(f"process for the agent cannot be started: {error}") from None
            except BaseException:
                ours.close()
                raise
        return cls(process, await asyncio.open_unix_connection(sock=ours), home=home, uid=launch.uid)

    async def call(self, request: Document, body: bytes, files: Files) -> Document:
        """Runs one attempt and returns the child's answer. After a cancellation the caller has to end the child.

        Raises:
            AgentFailed: If the agent fails or the child exits.
        """
        self.attempt_count += 1
        self._process.watch.begin()
        self._process.watch_folders(files.root, self._home)
        if self._uid is not None:
            await give(files.root, self._uid)
        return await self._request(encode(request, body))

    def leave_printed(self, printed: PrintedTails) -> None:
        """Leaves the end of what the last attempt printed."""
        self._process.watch.leave(printed)

    @property
    def is_alive(self) -> bool:
        """Whether the child is running within its limits."""
        return not (self._process.kept.exited.done() or self._process.breach.done())

    async def has_no_descendants(self) -> bool:
        """Returns True if no descendant is alive. Always False without /proc."""
        return Path("/proc/self/stat").exists() and await self._process_count() == self._own_processes

    async def _process_count(self) -> int:
        keeper = self._process.kept.keeper
        return len((await asyncio.to_thread(measure, (keeper,)))[keeper].processes)

    async def end(self) -> None:
        """Ends the child and all its descendants."""
        try:
            await self._process.end()
        finally:
            self._writer.close()
            await asyncio.to_thread(_delete_home, self._home)

    async def _request(self, message: bytes) -> Document:
        process = self._process
        self._writer.write(message)
        answer = asyncio.ensure_future(receive(self._reader))
        try:
            ends = (process.watch.flooded, process.breach, process.kept.exited)
            await asyncio.wait((answer, *ends), return_when=asyncio.FIRST_COMPLETED)
            if process.watch.flooded.done() or process.breach.done():
                raise AgentFailed(await self._exit_message())
            # A descendant may keep the connection open after the child has exited.
            async with asyncio.timeout(None if answer.done() else PIPE_TIMEOUT_S):
                document, _ = await answer
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            raise AgentFailed(await self._exit_message()) from None
        except MessageTooLarge:
            raise AgentFailed("answer of the agent process is too large") from None
        except ValueError:
            raise AgentFailed("answer of the agent process is malformed") from None
        finally:
            answer.cancel()
        return document

    async def _exit_message(self) -> str:
        closed = not await self._exited()
        await self._process.end()
        if closed:
            return "agent process closed its connection to the runner"
        result = self._process.result()
        stderr = cut_at_front(result.stderr.decode(errors="replace"), MAX_MESSAGE_BYTES)
        reason = result.failure or f"exited with status 0\n{stderr}".rstrip()
        return f"agent process {reason}"

    async def _exited(self) -> bool:
        ends = (self._process.watch.flooded, self._process.breach, self._process.kept.exited)
        done, _ = await asyncio.wait(ends, timeout=PIPE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)


@dataclass(slots=True, kw_only=True)
class Children:
    """The children of a runner.

    Few are started at a time: a hundred that import at the same time would starve each other beyond the attempts' timeouts.
    Meanwhile attempts share the existing children.
    """

    host: ChildHost
    policy: ChildPolicy
    _idle: "OrderedDict[Child, ChildProgram]" = field(default_factory=OrderedDict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _waiting: "list[tuple[ChildProgram, asyncio.Future[Child]]]" = field(default_factory=list)
    _starting: "set[asyncio.Task[Child | None]]" = field(default_factory=set)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(max(2, os.cpu_count() or 1)))

    async def call(
        self, program: ChildProgram, request: Document, body: bytes, files: Files, printed: PrintedTails | None = None
    ) -> Document:
        """Runs one attempt in an idle or new child. On cancellation, ends the child.

        `printed` gets the end of what it printed, however it ends.

        Raises:
            AgentFailed: If the agent fails or its process exits.
        """
        child = self._take(program) or await self._awaited(program)
        keep = False
        try:
            answer = await child.call(request, body, files)
            keep = (
                answer.get("reusable") is True
                and child.attempt_count < self.policy.max_attempts
                and await child.has_no_descendants()
            )
        finally:
            # Also if the attempt was cancelled before `keep` was set.
            try:
                if not keep:
                    await child.end()
            finally:
                if printed is not None:
                    child.leave_printed(printed)
            if keep:
                self._hand_over(child, program)
        return answer

    async def close(self) -> None:
        """Ends all idle children, and those that are being started."""
        for task in set(self._starting):
            task.cancel()
        if self._starting:
            await asyncio.wait(set(self._starting))
        while self._idle:
            self._end_later(self._idle.popitem()[0])
        if self._ending:
            await asyncio.wait(set(self._ending))

    async def _awaited(self, program: ChildProgram) -> Child:
        """Starts a child in the background, and returns the first one that is free: this or another.

        Raises:
            AgentFailed: If the child cannot be started or cannot load the program.
            HostUnavailable: If it cannot be isolated on this machine.
        """
        waiter = program, asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        task = asyncio.create_task(self._start(program), name="start child")
        self._starting.add(task)
        task.add_done_callback(partial(self._started, program))
        try:
            return await waiter[1]
        except asyncio.CancelledError:
            if waiter[1].done() and not waiter[1].cancelled() and waiter[1].exception() is None:
                self._hand_over(waiter[1].result(), program)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    async def _start(self, program: ChildProgram) -> Child | None:
        async with self._turns:
            return await Child.start(program, self.host) if self._first_waiting(program) is not None else None

    def _started(self, program: ChildProgram, task: "asyncio.Task[Child | None]") -> None:
        self._starting.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            if (waiting := self._first_waiting(program)) is not None:
                waiting.set_exception(error)
        elif (child := task.result()) is not None:
            _log.debug("child_started", target=program.target)
            self._hand_over(child, program)

    def _first_waiting(self, program: ChildProgram) -> "asyncio.Future[Child] | None":
        return next((freed for known, freed in self._waiting if known == program and not freed.done()), None)

    def _hand_over(self, child: Child, program: ChildProgram) -> None:
        """Gives a child to the attempt that has waited longest; without one, keeps it idle."""
        waiting = self._first_waiting(program) if child.is_alive else None
        if waiting is None:
            self._put(child, program)
        else:
            waiting.set_result(child)

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
        asyncio.get_running_loop().call_later(self.policy.idle_timeout_s, self._end_expired)
        while len(self._idle) > self.policy.max_idle:
            self._end_later(self._idle.popitem(last=False)[0])

    def _end_expired(self) -> None:
        expired_s = time.monotonic() - self.policy.idle_timeout_s
        for child in list(self._idle):
            if not child.is_alive or child.idle_since_s <= expired_s:
                del self._idle[child]
                self._end_later(child)

    def _end_later(self, child: Child) -> None:
        task = asyncio.create_task(child.end(), name="end child")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _new_home(folder: Path) -> Path:
    folder.mkdir(mode=ENTERED_BY_ALL, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="home-", dir=folder))


def _delete_home(home: Path) -> None:
    try:
        delete_tree(home)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("home_not_deleted", path=str(home), error=str(error))


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
