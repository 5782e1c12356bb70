"""Tells what a dead runner left at an engine or in a cluster from what a live one still needs.

Invariant: nothing of a runner that may be alive is ever called left behind before its own time is over.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
"""The host name that Docker gives to a container; no two have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A runner process.

    Attributes:
        host: Host or pod name.
        process: `<process id>-<start, seconds>-<process id namespace>`.
    """

    host: str
    process: str

    @classmethod
    def this_process(cls, host: str) -> Self:
        """Returns the owner that this process is."""
        return cls(host=host, process=_process_text(psutil.Process()))

    def left(self, *, host: str, process: str, deadline_unix_s: float, now_unix_s: float) -> bool:
        """Tells whether something is left behind: its time is over, or its runner was on this host and is dead.

        Args:
            host: Of the runner that made it.
            process: Of that runner.
            deadline_unix_s: When its runner would have removed it at the latest.
            now_unix_s: Seconds since 1970.
        """
        return now_unix_s > deadline_unix_s or (host == self.host and self._is_dead(process))

    def _is_dead(self, process: str) -> bool:
        pid, _, rest = process.partition("-")
        namespace = rest.partition("-")[2]
        if not pid.isdecimal():
            return False
        if namespace != self.process.rpartition("-")[2]:
            # A runner in a container that was started again. Elsewhere a name may stand for several machines.
            return _CONTAINER_ID.fullmatch(self.host) is not None
        try:
            return _process_text(psutil.Process(int(pid))) != process
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


def deadline_of(labels: Mapping[str, str], name: str) -> float:
    """Returns the deadline among labels; one that cannot be read never comes."""
    text = labels.get(name, "")
    return float(text) if text.isdecimal() else float("inf")


def _process_text(process: psutil.Process) -> str:
    namespace = Path("/proc/self/ns/pid")
    inode = namespace.stat().st_ino if namespace.exists() else 0
    return f"{process.pid}-{int(process.create_time())}-{inode}"
