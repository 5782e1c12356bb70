"""Takes memory away from a process: by a control group where one can be made, else by a limit of its address space."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import psutil

__all__ = ["MemoryLimit"]

FURTHER_BYTES = 0
"""What victims may still use in a group; the pages that they have already stay charged to where they came from."""
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.failcnt"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.events"),
)
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class MemoryLimit:
    """A limit on some processes, which ends with `lift`."""

    def __init__(self, pids: list[int]) -> None:
        """Sets it: from now on the kernel kills what needs more (a group), or its allocations fail (address space)."""
        self._pids = pids
        self._group = _make_group()
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if self._group is None:
                    size = psutil.Process(pid).memory_info().vms
                    resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
                else:
                    (self._group / "cgroup.procs").write_text(str(pid))

    @property
    def by(self) -> str:
        """What holds the limit, and how often the kernel refused memory for it."""
        if self._group is None:
            return "address space"
        counts = next(file for _, _, name in GROUPS if (file := self._group / name).exists()).read_text().split()
        refused = counts[counts.index("max") + 1] if "max" in counts else counts[0]
        return f"control group, {refused} requests for memory refused"

    def lift(self) -> None:
        """Ends the limit for those that live."""
        if self._group is None:
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_AS, UNLIMITED)
            return
        # Also for the children that began in the group.
        for member in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self._group.parent / "cgroup.procs").write_text(member)
        with contextlib.suppress(OSError):
            self._group.rmdir()


def _make_group() -> Path | None:
    """Makes a group of its own with the limit; None if that is not allowed, or there is no controller of memory."""
    for root, limit, _ in GROUPS:
        group = root / f"fulmen-matrix-{os.getpid()}"
        try:
            group.mkdir(exist_ok=True)
            (group / limit).write_text(str(FURTHER_BYTES))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        return group
    return None
