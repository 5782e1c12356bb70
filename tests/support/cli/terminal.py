"""Programs with a terminal of their own, such as a debugger needs.

with terminal_program([sys.executable, "-m", "fulmen_cli", ...], folder=folder) as program:
    program.read_until("(Pdb)")
    program.write("continue\\n")
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["TerminalProgram", "terminal_program"]

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
END_LIMIT_S = 60.0


class TerminalProgram:
    """A running program and the other end of its terminal."""

    def __init__(self, pid: int, terminal: int) -> None:
        """Takes over a program that was just started: see `terminal_program`."""
        self.pid = pid
        self._terminal = terminal
        self._status: int | None = None

    def read_until(self, word: str, *, timeout_s: float = 30.0) -> str:
        """Returns what it has written since the last reading, up to a word; fails if that does not come in time."""
        text = ""
        deadline = time.monotonic() + timeout_s
        while word not in text and time.monotonic() < deadline:
            if select.select([self._terminal], [], [], 1)[0]:
                try:
                    text += _COLOURS.sub("", os.read(self._terminal, 4096).decode(errors="replace"))
                except OSError:  # It has ended.
                    break
        assert word in text, text
        return text

    def write(self, text: str) -> None:
        """Types a text."""
        os.write(self._terminal, text.encode())

    def exit_status(self) -> int:
        """Waits for its end and returns its exit status, negative for a signal."""
        deadline = time.monotonic() + END_LIMIT_S
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                break
            assert time.monotonic() < deadline, "it has not ended"
            # What it still writes is read, since it would wait for that.
            if select.select([self._terminal], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    os.read(self._terminal, 4096)
        return self._status

    def close(self) -> None:
        """Kills it if it still runs."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)


@contextmanager
def terminal_program(command: Sequence[str], *, folder: Path) -> Iterator[TerminalProgram]:
    """Starts a program on a new terminal, and kills it in the end if it has not ended."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(command[0], list(command))
    program = TerminalProgram(pid, terminal)
    try:
        yield program
    finally:
        program.close()
