"""Runs a program and ends all its descendants: a standalone script, `python guardian.py LOG ARGV`.

Invariant: when the program ends, when the parent of this script ends (which closes its standard input), or on SIGTERM
or SIGINT, every process of its group is ended, this one last. If this process is killed, the kernel sends SIGTERM to
the program. To stay small it imports only the standard library.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 8.0
ORPHANS_GRACE_S = 1.0
POLL_S = 0.05
CANNOT_START = 127
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def main(log: str, argv: list[str]) -> int:
    """Runs the program to its end; returns its exit status, 128 plus the number of a signal."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # other processes must not be in the group
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    library = ctypes.CDLL(None)
    # When the program dies, its children become children of this process, which can then reap them.
    library.prctl(PR_SET_CHILD_SUBREAPER, 1)
    with open(log, "ab") as output:  # noqa: PTH123 - pathlib takes longer to import than all of this
        try:
            program = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=lambda: library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        except OSError as error:
            output.write(f"{argv[0]}: {error.strerror}\n".encode())
            return CANNOT_START
    threading.Thread(target=_until_closed, args=(ending,), daemon=True).start()
    while program.poll() is None and not ending.wait(POLL_S):
        pass
    _end_group(program)
    status = program.wait()
    return 128 - status if status < 0 else status


def _until_closed(ending: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    ending.set()


def _end_group(program: "subprocess.Popen[bytes]") -> None:
    """Terminates the other processes of the group, waits, then kills the rest."""
    own = os.getpid()
    _signal(signal.SIGTERM, own)
    # If the program has died, its descendants get little time, so that it can be restarted soon.
    give_up_at = time.monotonic() + (GRACE_S if program.poll() is None else ORPHANS_GRACE_S)
    while _members(own, program) and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
    _signal(signal.SIGKILL, own)
    while _members(own, program):
        time.sleep(POLL_S)


def _signal(number: int, own: int) -> None:
    for pid in _group(own):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _members(own: int, program: "subprocess.Popen[bytes]") -> bool:
    """Returns whether the group has other members, and reaps those that have ended."""
    program.poll()
    for pid in _group(own):
        if pid != program.pid:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
    return bool(_group(own))


def _group(own: int) -> list[int]:
    """Lists the other living processes of this group."""
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if not entry.isdigit() or int(entry) == own:
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:  # noqa: PTH123
                state, _, group = stat.read().rpartition(b")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == os.getpgrp() and state != b"Z":
            found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
