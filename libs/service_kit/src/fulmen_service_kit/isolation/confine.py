"""Confines this process before it executes code of a tenant. Imports only the standard library.

`confine` is called in a forked process. Run as a script (`python -I -S confine.py DOCUMENT PROGRAM ARGUMENT...`), it starts
the program as a confined child, exits with its status, and kills everything that it left behind, also on SIGTERM and when
the service that started it dies.

Invariant: if any step fails, the program is not executed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path

# Not imported: a guardian loads this file, and each keeper is forked with what the guardian has loaded.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

SECCOMP_FILE = 40
"""Descriptor from which bubblewrap reads the filter: above those of programs, below those of a guardian."""

ENVIRONMENT_FILE = 41
"""Descriptor from which `enter_sandbox` reads the program's environment."""

CANNOT_CONFINE = 125
CANNOT_EXECUTE = 127

_SET_PARENT_DEATH_SIGNAL, _SET_SECCOMP, _SET_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 22, 36, 38
_SECCOMP_FILTER_MODE = 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_FILE_ACCESS = 0b100_0000_0000_0111
"""Execute, write, read, truncate: the rights that a rule on a file can have."""
_READ_ACCESS = 0b1101
"""Execute, read, list."""
_RIGHTS_OF_VERSION = (0, 13, 14, 15)
"""Number of rights on files by Landlock's version; later versions add rights on devices, which are not handled."""
SCOPE_VERSION, _SCOPE = 6, 0b11
"""Signals and abstract sockets outside the domain are denied from this version on."""

_KILL_INTERVAL_S = 0.02


def confine(document: Mapping[str, Any], environment: Mapping[str, str]) -> Mapping[str, str]:
    """Confines this process and its future children; see `launch.Launch.confinement`.

    Args:
        document: What to do.
        environment: The environment of the tenant's program.

    Returns:
        The environment to execute with: the program's, or that of a launcher, which a tenant must not choose.

    Raises:
        OSError: If a step fails.
    """
    for file in document["cgroup_files"]:
        Path(file).write_bytes(b"0")
    if document["ignores_sigterm"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name, limit in document["limits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (limit, limit))
    if document["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[document["uid"]] * 3)
        os.setresuid(*[document["uid"]] * 3)
    if document["is_trusted"] or sys.platform != "linux":
        return environment
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)
    if document["readable"] or document["writable"]:
        _restrict_files(document["readable"], document["writable"])
    program = bytes.fromhex(document["filter"])
    if not document["has_launcher"]:
        _filter_calls(program)
        return environment
    # Namespaces without one of the network share abstract sockets.
    if landlock_version() >= SCOPE_VERSION:
        scope = struct.pack("=QQQ", 0, 0, _SCOPE)
        _restrict_self(_call(_CREATE_RULESET, scope, len(scope), 0))
    if program:
        _give_file(SECCOMP_FILE, program)
    entries = (os.fsencode(f"{name}={value}\0") for name, value in environment.items())
    _give_file(ENVIRONMENT_FILE, b"".join(entries))
    return {}


def landlock_version() -> int:
    """Returns the version of Landlock that the kernel has enabled; 0 if none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG))


def _restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Source: landlock(7)."""
    version = landlock_version()
    rights = (1 << _RIGHTS_OF_VERSION[min(version, len(_RIGHTS_OF_VERSION) - 1)]) - 1
    attributes = struct.pack("=QQQ", rights, 0, _SCOPE if version >= SCOPE_VERSION else 0)
    # An older kernel refuses fields that it does not know.
    size = len(attributes) if version >= SCOPE_VERSION else 8
    ruleset = _call(_CREATE_RULESET, attributes, size, 0)
    for path, access in [*((path, _READ_ACCESS) for path in readable), *((path, rights) for path in writable)]:
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            # Missing, or not to be reached by this user: there is nothing to allow.
            continue
        allowed = access & rights if os.path.isdir(path) else access & rights & _FILE_ACCESS  # noqa: PTH112  # Start-up time.
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, file), 0)
        os.close(file)
    _restrict_self(ruleset)


def _restrict_self(ruleset: int) -> None:
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _give_file(descriptor: int, content: bytes) -> None:
    """Opens a file in memory for the program that this process will execute."""
    file = os.memfd_create("given")
    with os.fdopen(file, "wb", closefd=False) as given:
        given.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, descriptor)
    os.close(file)


def _filter_calls(program: bytes) -> None:
    if not program:
        return
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _prctl(_SET_SECCOMP, _SECCOMP_FILTER_MODE, ctypes.c_char_p(header))


def _prctl(option: int, *arguments: Any) -> None:
    given = [*arguments, *[0] * (4 - len(arguments))]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *[ctypes.c_ulong(each) if isinstance(each, int) else each for each in given]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _call(number: int, *arguments: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *[ctypes.c_size_t(e) if isinstance(e, int) else e for e in arguments]))
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, f"landlock: {os.strerror(failed)}")
    return result


def main() -> NoReturn:
    """Runs a program as a confined child; exits with its status when all its descendants are dead."""
    document, program = json.loads(sys.argv[1]), sys.argv[2:]
    fork_supervised()
    _execute(document, program)


def fork_supervised() -> None:
    """Forks, and returns in the child. This process ends with its status, when all its descendants are dead."""
    if sys.platform == "linux":
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        _prctl(_SET_SUBREAPER, 1)
    child = os.fork()
    if not child:
        if sys.platform == "linux":
            _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, _end)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            _kill_descendants()
            sys.exit(code if code >= 0 else 128 - code)


def _end(number: int, frame: object) -> NoReturn:
    _kill_descendants()
    os._exit(128 + number)


def _execute(document: Mapping[str, Any], program: Sequence[str]) -> NoReturn:
    failed = CANNOT_CONFINE
    try:
        environment = confine(document, os.environ)
        if sys.platform == "linux":
            # After the change of user, which clears it.
            _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        failed = CANNOT_EXECUTE
        os.execvpe(program[0], list(program), environment)  # noqa: S606  # Starting programs is its purpose.
    except OSError as error:
        os.write(2, f"{program[0]} cannot be started: {error.strerror or error}\n".encode())
    os._exit(failed)


def _kill_descendants() -> None:
    """Kills all descendants; orphans among them become children of this process, its subreaper."""
    while children := _children():
        for each in children:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        signal.sigtimedwait([signal.SIGCHLD], _KILL_INTERVAL_S)
        while True:
            try:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    break
            except ChildProcessError:
                return


def _children() -> list[int]:
    own = os.getpid()
    try:
        return [int(child) for child in Path(f"/proc/{own}/task/{own}/children").read_bytes().split()]
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return []


if __name__ == "__main__":
    main()
