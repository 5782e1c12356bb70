"""Kills the process groups of a runner that died. Run as a script, without site packages; see `guardian`.

Reads lines from standard input: `+<group>` to watch, `-<group>` to forget. At the end of input, which comes when the
runner is gone for whatever reason, it kills every group that it still watches.
"""

import os
import signal
import sys


def main() -> None:
    """Watches until the end of input."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
