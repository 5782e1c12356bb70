"""Heartbeats: a process shows that its event loop turns, and the process that started it ends it when it no longer does.

The parent gives its child the write end of a pipe. The child writes a byte to it every second from its event loop, from when it
serves until the loop ends. A child that was stopped (SIGSTOP), or whose loop is blocked, falls silent and is noticed within ten
seconds.

Slow is not hung: time in which a thread of the child waited for a processor or for a disk, and time in which the parent did
not run either, is not silence, up to a limit. What a service cannot reach is the business of readiness, not of heartbeats.

`python -m fulmen_service_kit.heartbeat PROGRAM ARGUMENT...` runs a program and ends it when it hangs: in a container, whose
engine then starts it again. With `--restart` it starts the program again itself, for ever.

Imports only the standard library, because it runs beside every service.
"""

import asyncio
import contextlib
import faulthandler
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from fulmen_service_kit import launch
from fulmen_service_kit.standard_streams import never_raise

__all__ = ["EXIT_HUNG", "Heartbeat", "Pulse", "ended", "heartbeat"]

VARIABLE: Final = "FULMEN_HEARTBEAT_FD"
BEAT_S: Final = 1.0
CHECK_S: Final = 0.5
HUNG_AFTER_S: Final = 7.0
MAX_SILENCE_S: Final = 30.0
"""Silence after which a process is hung, whatever it waits for."""
ABORT_S: Final = 1.0
EXIT_HUNG: Final = 70
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 10.0
STABLE_S: Final = 60.0
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Heartbeat:
    """The child's end of the pipe; without a parent that listens it does nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._beating: asyncio.Task[None] | None = None

    def beat(self) -> None:
        """Shows once that this process is alive. May be called from any thread."""
        if self._descriptor is not None:
            # A full pipe means that the parent does not run, a broken one that it has ended.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._descriptor, b".")

    def start(self) -> None:
        """Beats from the running event loop until the loop ends, because what a process does last takes time, too."""
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._run(), name="heartbeat")

    async def _run(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)


@functools.cache
def heartbeat() -> Heartbeat:
    """Returns this process's heartbeat. Call it before this process starts others, which must not inherit the pipe."""
    text = os.environ.pop(VARIABLE, "")
    if not text.isdecimal():
        return Heartbeat(None)
    try:
        os.set_inheritable(int(text), False)
        os.set_blocking(int(text), False)
    except OSError:
        return Heartbeat(None)  # a copy of another process's environment, without its pipe
    # One that is aborted writes where its threads are.
    faulthandler.enable()
    return Heartbeat(int(text))


class Pulse:
    """The parent's end of a child's pipe: judges whether the child hangs."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._pid = 0
        self._checked_at = 0.0
        self._waits_s: dict[str, float] = {}
        self._total_s = 0.0
        self.silent_s = 0.0
        self.has_begun = False

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that the child inherits."""
        return (self._write,)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the child."""
        return {VARIABLE: str(self._write)}

    @property
    def inherited(self) -> Mapping[str, int]:
        """Descriptors that a forked child gets, by the variables that name them."""
        return {VARIABLE: self._write}

    def started(self, pid: int) -> None:
        """Begins to watch the child; called once, after its start."""
        os.close(self._write)
        self._write = -1
        self._pid, self._checked_at = pid, time.monotonic()

    def close(self) -> None:
        """Closes the pipe."""
        for descriptor in (self._read, self._write):
            if descriptor >= 0:
                os.close(descriptor)
        self._read = self._write = -1

    async def until_hung(self) -> None:
        """Returns when the child hangs."""
        while not self.is_hung():  # noqa: ASYNC110  # state of another process
            await asyncio.sleep(CHECK_S)

    def is_hung(self) -> bool:
        """Returns whether the child hangs; called every half second. One that never beat does not."""
        now = time.monotonic()
        passed_s, self._checked_at = min(now - self._checked_at, 2 * CHECK_S), now
        beats = b""
        with contextlib.suppress(BlockingIOError):
            beats = os.read(self._read, 4096)
        if beats or not self.has_begun:
            self.has_begun = self.has_begun or bool(beats)
            self.silent_s = self._total_s = 0.0
            self._waits_s = _waits_s(self._pid) if self.has_begun else {}
            return False
        waits_s = _waits_s(self._pid)
        waited_s = max((total - self._waits_s.get(thread, 0.0) for thread, total in waits_s.items()), default=0.0)
        self._waits_s = waits_s
        self._total_s += passed_s
        if not _waits_for_disk(self._pid):
            self.silent_s += max(0.0, passed_s - waited_s)
        return self.silent_s >= HUNG_AFTER_S or self._total_s >= MAX_SILENCE_S


def _waits_s(pid: int) -> dict[str, float]:
    """Returns how long each thread of a process has waited for a processor, seconds; empty where it is not known.

    Source: proc(5), schedstat: time on the processor, time on a run queue, both in nanoseconds.
    """
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


def _waits_for_disk(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    return False


async def ended(wait: Callable[[], Awaitable[int]], send_signal: Callable[[int], object], pulse: Pulse) -> int:
    """Waits for the end of a child, and ends it when it hangs; returns its exit status, or `EXIT_HUNG`.

    Args:
        wait: Waits for its end; returns its exit status.
        send_signal: Sends it a signal.
        pulse: Its pulse, closed when it has ended.
    """
    exited = asyncio.ensure_future(wait())
    hung = asyncio.ensure_future(pulse.until_hung())
    try:
        await asyncio.wait({exited, hung}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            await _abort(exited, send_signal)
        pulse.close()
        return EXIT_HUNG if hung.done() else exited.result()
    finally:
        exited.cancel()
        hung.cancel()


async def _abort(exited: "asyncio.Future[int]", send_signal: Callable[[int], object]) -> None:
    """Ends a hung child, which first writes where its threads are, if it can.

    Raises:
        TimeoutError: If it is still there after 10 s, which means that the kernel holds it.
    """
    for number, limit_s in ((signal.SIGABRT, ABORT_S), (signal.SIGKILL, launch.KILL_LIMIT_S)):
        with contextlib.suppress(ProcessLookupError):
            send_signal(number)
        await asyncio.wait({exited}, timeout=limit_s)
        if exited.done():
            return
    raise TimeoutError("The process is still running.")


class _Keeper:
    """Runs a program, ends it when it hangs, and starts it again if asked to."""

    def __init__(self, command: list[str], *, restarts: bool) -> None:
        self._command = command
        self._restarts = restarts
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Runs until the program exits or this process is asked to stop; returns the exit status."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        pause_s, lives = FIRST_PAUSE_S, 0
        while True:
            begun = time.monotonic()
            status, had_begun = self._run_once()
            lives += 1
            # A program that exits before its first beat cannot start; its caller handles that.
            gives_up = status == 0 or (lives == 1 and status > 0 and not had_begun)
            if self._stopping or gives_up or not self._restarts:
                return 128 - status if status < 0 else status
            if time.monotonic() - begun > STABLE_S:
                pause_s = FIRST_PAUSE_S
            _say("process_restarts", program=self._command[-1], status=status, pause_s=pause_s)
            if not self._pause(pause_s):
                return 0
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def _run_once(self) -> tuple[int, bool]:
        """Runs the program once; returns its exit status, negative for a signal, and whether it ever beat."""
        pulse = Pulse()
        try:
            self._child = child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid()), *self._command],
                pass_fds=pulse.descriptors,
                env={**os.environ, **pulse.environment},
            )
            pulse.started(child.pid)
            if self._stopping:
                child.terminate()
            return self._watch(child, pulse), pulse.has_begun
        finally:
            self._child = None
            pulse.close()

    def _watch(self, child: "subprocess.Popen[bytes]", pulse: Pulse) -> int:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(CHECK_S)
            _reap(but=child.pid)
            if pulse.is_hung():
                _say("process_hung", pid=child.pid, silent_s=round(pulse.silent_s, 1))
                child.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(ABORT_S)
                child.kill()
                child.wait()
                return EXIT_HUNG

    def _pause(self, pause_s: float) -> bool:
        """Waits; returns False if this process was asked to stop meanwhile."""
        until = time.monotonic() + pause_s
        while not self._stopping and time.monotonic() < until:
            time.sleep(min(CHECK_S, pause_s))
        return not self._stopping

    def _forward(self, number: int, _frame: object) -> None:
        self._stopping = True
        child = self._child
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)


def _reap(*, but: int) -> None:
    """Collects orphans, which the first process of a container inherits."""
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == but:
                return
            os.waitpid(found.si_pid, 0)


def _say(event: str, **fields: object) -> None:
    sys.stderr.write(json.dumps({"event": event, "level": "error", **fields}) + "\n")
    sys.stderr.flush()


def main() -> None:
    """Runs the program that the arguments name."""
    never_raise()
    restarts = sys.argv[1:2] == ["--restart"]
    command = sys.argv[2:] if restarts else sys.argv[1:]
    program = shutil.which(command[0]) if command else None
    if program is None:
        sys.stderr.write("usage: python -m fulmen_service_kit.heartbeat [--restart] PROGRAM ARGUMENT...\n")
        sys.exit(2)
    command[0] = program
    sys.exit(_Keeper(command, restarts=restarts).run())


if __name__ == "__main__":
    main()
