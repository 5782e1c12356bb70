"""Ownership of containers and Jobs: which are leftovers of a dead service. Needs the package psutil.

Invariant: nothing of a service that may be alive counts as a leftover before its deadline.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
"""Default host name of a Docker container; unique."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process of a service.

    Attributes:
        host: Host or pod name.
        process: `<pid>-<start, seconds>-<pid namespace>`.
        is_only_host: Whether no other host has that name at the same time, as for a pod's.
    """

    host: str
    process: str
    is_only_host: bool = False

    @classmethod
    def this_process(cls, host: str, *, is_only_host: bool = False) -> Self:
        """Returns the owner for this process."""
        return cls(host=host, process=_process_text(psutil.Process()), is_only_host=is_only_host)

    def is_leftover(self, *, host: str, process: str, deadline_unix_s: float, now_unix_s: float) -> bool:
        """Returns True if the deadline has passed, or the creator ran on this host and is dead.

        Args:
            host: Host of the service that created it.
            process: Process of that service.
            deadline_unix_s: Latest time at which that service would have removed it, Unix seconds.
            now_unix_s: Current time, Unix seconds.
        """
        return now_unix_s > deadline_unix_s or (host == self.host and self._is_dead(process))

    def _is_dead(self, process: str) -> bool:
        pid, _, rest = process.partition("-")
        namespace = rest.partition("-")[2]
        if not pid.isdecimal():
            return False
        if namespace != self.process.rpartition("-")[2]:
            # The service's container was restarted. Other host names may be shared by several machines.
            return self.is_only_host or _CONTAINER_ID.fullmatch(self.host) is not None
        try:
            return _process_text(psutil.Process(int(pid))) != process
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


def deadline_of(labels: Mapping[str, str], name: str) -> float:
    """Returns the deadline in a label, Unix seconds; infinite if missing or malformed."""
    text = labels.get(name, "")
    return float(text) if text.isdecimal() else float("inf")


def _process_text(process: psutil.Process) -> str:
    namespace = Path("/proc/self/ns/pid")
    inode = namespace.stat().st_ino if namespace.exists() else 0
    return f"{process.pid}-{int(process.create_time())}-{inode}"
