"""Runs another program in this process, and ties it to the life of the parent process.

Run as a script (`python -I -S launch.py PARENT_PID PROGRAM ARGUMENT...`), so it imports only the standard library.
On Linux the kernel sends SIGKILL when the parent exits; on other systems the program must be killed by hand.
Source: prctl(2), PR_SET_PDEATHSIG; the setting survives execve(2), and has no effect if the parent has already exited.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_IS_GONE = 3
KILL_LIMIT_S = 10.0


def main() -> None:
    """Ties this process to its parent, then executes the program."""
    parent_pid, program, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent_pid):
        sys.exit(PARENT_IS_GONE)
    os.execv(program, [program, *arguments])  # noqa: S606  (no shell is wanted)


if __name__ == "__main__":
    main()
