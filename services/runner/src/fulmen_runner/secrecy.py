"""Keeps the runner's token and signing key from the programs that it runs, which are processes of the same user.

Linux lets a process read the environment and the memory of another one of its user, unless that is not dumpable
(prctl(2), PR_SET_DUMPABLE; proc_pid_environ(5)). Against programs of root, and Python agents inside the runner, nothing
helps: the former are not bound by it, the latter are the process.
"""

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def hide_process() -> None:
    """Makes the environment and the memory of this process unreadable for others of its user; ends core dumps, too.

    Linux only. What it starts is readable again.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
