"""Sees to it that no command outlives its runner, not even one that is killed with SIGKILL.

Invariant: a command's program starts only after its group is known to the guardian, a small process of its own. What is
guaranteed is the process group: a descendant that moves to a session of its own (`setsid`) is out of reach.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import structlog

_SCRIPT = Path(__file__).with_name("guardian_main.py")
_EXIT_DEADLINE_S = 5.0

_log = structlog.get_logger()


class Guardian:
    """The guardian process; it starts with the first command and again should it die."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def watch(self, group: int) -> None:
        """Has a process group killed if this process dies."""
        self._groups.add(group)
        if not self._tell(b"+%d\n" % group):
            self._restart()

    def forget(self, group: int) -> None:
        """Ends the watch: the group is gone."""
        self._groups.discard(group)
        if not self._tell(b"-%d\n" % group):
            self._restart()

    async def close(self) -> None:
        """Ends the guardian, which kills the groups that are left."""
        if self._process is None:
            return
        process, self._process = self._process, None
        _close_input(process)
        await asyncio.to_thread(process.wait, _EXIT_DEADLINE_S)

    def _tell(self, line: bytes) -> bool:
        if self._process is None or self._process.stdin is None:
            return False
        try:
            # A few bytes into a pipe that the guardian reads at once: this does not block.
            self._process.stdin.write(line)
        except BrokenPipeError:
            _log.warning("guardian_died", pid=self._process.pid)
            return False
        return True

    def _restart(self) -> None:
        if self._process is not None:
            _close_input(self._process)
            self._process.wait(_EXIT_DEADLINE_S)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        for group in self._groups:
            self._tell(b"+%d\n" % group)


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
