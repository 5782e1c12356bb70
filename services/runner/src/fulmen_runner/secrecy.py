"""Hides the runner's token from commands, which run as the same user.

On Linux a process can read the environment and memory of others of its user, unless they are not dumpable (prctl(2),
PR_SET_DUMPABLE; proc_pid_environ(5)). This does not protect against root or against Python agents inside the runner.
"""

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def hide_process() -> None:
    """Makes this process's environment and memory unreadable for its user, and disables core dumps. Linux only.

    Not inherited by processes that it starts.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
