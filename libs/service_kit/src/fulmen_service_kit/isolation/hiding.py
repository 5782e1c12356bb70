"""Hides a service from other processes of its user: its memory, its environment and the secrets in it.

This does not protect against root, nor against code inside the process. Processes that it starts do not inherit it.
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_PR_SET_DUMPABLE = 4
_ENVIRONMENT_START, _ENVIRONMENT_END = 47, 48
"""Fields of /proc/self/stat after the name in parentheses (proc_pid_stat(5), less three)."""


def hide_process() -> None:
    """Makes this process's environment and memory unreadable for its user, and disables core dumps. Linux only.

    Source: prctl(2), PR_SET_DUMPABLE; proc_pid_environ(5).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def forget_variables(names: Iterable[str]) -> None:
    """Removes variables from this process's environment, and overwrites their values where the kernel shows it."""
    given = {name: value for name in names if (value := os.environ.pop(name, ""))}
    if given and sys.platform == "linux":
        _overwrite({f"{name}={value}".encode(errors="surrogateescape"): len(name) + 1 for name, value in given.items()})


def _overwrite(entries: dict[bytes, int]) -> None:
    """Overwrites the values of entries in the memory behind /proc/self/environ; `entries` has where each begins."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[_ENVIRONMENT_START]), int(fields[_ENVIRONMENT_END])
    if not start < end:
        return
    memory = (ctypes.c_char * (end - start)).from_address(start)
    place = 0
    for entry in bytes(memory).split(b"\0"):
        value_at = entries.get(entry)
        if value_at is not None:
            ctypes.memset(start + place + value_at, ord("*"), len(entry) - value_at)
        place += len(entry) + 1
