"""Several guardians in one container, whose processes share its devices and memory: `python -m` it with their number.

It ends when all of them have ended, or the first of them fails; the remaining ones then end, too.
"""

import os
import sys
from subprocess import DEVNULL, Popen

from fulmen_algorithm.cluster import member
from fulmen_service_kit import launch

_SIGNALLED = 128


def run(count: int) -> int:
    """Runs guardians; returns the exit status of the first that fails, else 0."""
    tied = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())]
    guardians = [Popen([*tied, sys.executable, "-m", member.__name__], stdin=DEVNULL) for _ in range(count)]
    left = {guardian.pid for guardian in guardians}
    while left:
        # The first process of a container is also the parent of those that lost theirs.
        pid, ended = os.wait()
        status = os.waitstatus_to_exitcode(ended)
        if pid in left and status:
            return status if status > 0 else _SIGNALLED - status
        left.discard(pid)
    return 0


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
