"""Executes a program inside a sandbox that a launcher has made. Imports little, since it runs before every program.

`python -I -S enter_sandbox.py FILE UID PROCESSES PROGRAM ARGUMENT...`: FILE is the descriptor with the program's environment,
`name=value` and a zero byte for each variable; an empty UID keeps the user; 0 processes set no limit.

Invariant: a variable of the program is in no environment before the program's own: the launcher and this script run with
privileges that the program must not have, and a variable such as LD_PRELOAD or PATH would choose what they execute.
"""

import os
import resource
import signal
import sys

CANNOT_EXECUTE = 127


def main() -> None:
    """Becomes the program; exits with `CANNOT_EXECUTE` if it cannot be executed."""
    environment, uid, processes, *program = sys.argv[1:]
    with os.fdopen(int(environment), "rb") as file:
        entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    # Ignored by the launcher, or by Python.
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if int(processes):
        resource.setrlimit(resource.RLIMIT_NPROC, (int(processes),) * 2)
    if uid:
        os.setgroups([])
        os.setresgid(*[int(uid)] * 3)
        os.setresuid(*[int(uid)] * 3)
    try:
        os.execvpe(program[0], program, {name: value for name, _, value in entries})  # noqa: S606  # Its purpose.
    except OSError as error:
        os.write(2, f"{program[0]} cannot be started: {error.strerror}\n".encode(errors="surrogateescape"))
    os._exit(CANNOT_EXECUTE)


if __name__ == "__main__":
    main()
