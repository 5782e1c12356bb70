"""Starts the programs under test in forks of a process that has imported them, which saves a second of imports each time.

`Popen` and everything that uses it start `python -m fulmen_store` and the like so, in the same way as other programs: the
process is a child of the tests' own, with its own environment, descriptors, session and command line. So are services that
`fulmen_service_kit.launch` ties to their parent. Whatever differs for the interpreter itself (PYTHONPATH, a `preexec_fn`,
another user) is started as usual. Linux only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["ENVIRONMENT", "OF_THE_INTERPRETER", "install", "started_as_usual"]

MODULES = ("fulmen_store", "fulmen_runner", "fulmen_llm_proxy", "fulmen_algorithm", "fulmen_cli")
ALSO_IMPORTED = {"fulmen_cli": ("fulmen_cli.main", "pydantic.main"), "fulmen_llm_proxy": ("fulmen_llm_proxy.app",)}
"""What a program imports later, depending on its arguments and settings: of the command line every command, which takes longer than
they do; of the proxy what its supervisor of workers does not need."""
OF_THE_INTERPRETER = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "OPENBLAS_", "GRPC_", "LANG", "LC_", "TZ")
"""Beginnings of variables that are read when Python or a library starts."""
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
UNBUFFERED = "PYTHONUNBUFFERED"
"""The one of them that a fork obeys."""
LAUNCHER = "fulmen_service_kit/launch.py"
UNUSUAL = ("executable", "preexec_fn", "gid", "gids", "uid", "shell")
LENGTH_BYTES = 4
CLONE_PARENT = 0x00008000  # linux/sched.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_IS_GONE = 3
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


def install() -> None:
    """Has this process start the programs so. A program starts as usual until its server has imported it."""
    if sys.platform == "linux" and os.uname().machine in SYS_CLONE:
        global NETWORK
        NETWORK = _network()
        # What importing the service kit adds, to this process, too: it must not tell what is started later from a fork.
        os.environ.setdefault(FORK_SUPPORT, "0")
        ENVIRONMENT.update(os.environ)
        subprocess.Popen = _Popen  # type: ignore[misc]
        atexit.register(_close)


@contextmanager
def started_as_usual() -> Iterator[None]:
    """Has the programs start as usual meanwhile: what /proc shows of a fork's environment is that of its server."""
    started, subprocess.Popen = subprocess.Popen, _USUAL  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = started  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """One of the programs, as a command line names it.

    Attributes:
        module: What is run.
        arguments: Its arguments.
        is_tied: Whether it ends with its parent.
        is_safe: Whether it imports nothing of its working directory (`python -P`).
    """

    module: str
    arguments: list[str]
    is_tied: bool
    is_safe: bool


def _program_of(words: list[str]) -> _Program | None:
    """Returns what a command line runs; None if it is none of the programs."""
    launched = words[:3] == [sys.executable, "-I", "-S"] and len(words) > 5 and words[3].endswith(LAUNCHER)
    is_tied = launched and words[4] == str(os.getpid())
    if launched and not is_tied:
        return None
    rest = words[5:] if is_tied else words
    is_safe = rest[:2] == [sys.executable, "-P"]
    rest = rest[2:] if is_safe else rest[1:] if rest[:1] == [sys.executable] else []
    if len(rest) < 2 or rest[0] != "-m" or rest[1] not in MODULES:
        return None
    return _Program(module=rest[1], arguments=rest[2:], is_tied=is_tied, is_safe=is_safe)


class _Server:
    """A process that has imported one program, and forks it."""

    def __init__(self, module: str) -> None:
        self._control, theirs = socket.socketpair()
        self.is_ready = False
        with theirs:
            command = [sys.executable, "-m", "tests.support.forked", module, " " * 800]
            # Not as the test that comes first has changed it.
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), cwd=Path(__file__).parents[2], env=ENVIRONMENT
            )

    def takes(self, environment: Mapping[str, str] | None) -> bool:
        """Returns whether it is ready and can start a program with this environment."""
        if not self.is_ready:
            with suppress(BlockingIOError):
                self.is_ready = self._control.recv(1, socket.MSG_DONTWAIT) == b"R"
        if not self.is_ready or self._process.poll() is not None:
            return False
        given = os.environ if environment is None else environment
        # One that is missing changes nothing that the programs use, except the path of modules.
        names = {"PYTHONPATH", *(name for name in map(os.fsdecode, given) if name.startswith(OF_THE_INTERPRETER))}
        names.discard(UNBUFFERED)
        return all(given.get(name) == ENVIRONMENT.get(name) for name in names)

    def fork(self, words: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Starts the program; returns its process id."""
        orders = json.dumps(words).encode()
        socket.send_fds(self._control, [len(orders).to_bytes(LENGTH_BYTES, "big")], list(descriptors))
        self._control.sendall(orders)
        return int.from_bytes(_read(self._control, LENGTH_BYTES), "big")

    def close(self) -> None:
        """Ends the server, not what it has forked."""
        self._control.close()
        self._process.wait()


ENVIRONMENT: dict[str, str] = {}
"""Variables of this process when it began to fork programs."""

NETWORK = ""
"""Network namespace of this process when it began to fork programs."""

_servers: dict[str, _Server] = {}
_lock = threading.Lock()


_USUAL = subprocess.Popen


class _Popen(subprocess.Popen):
    """A child process, forked if it runs one of the programs."""

    is_forked = False

    def _execute_child(self, *positional: Any, **named: Any) -> None:
        given = SIGNATURE.bind(self, *positional, **named).arguments
        self.is_forked = self._fork(given)
        if not self.is_forked:
            super()._execute_child(*positional, **named)  # type: ignore[misc]

    def _fork(self, given: dict[str, Any]) -> bool:
        command = given["args"]
        if isinstance(command, str | bytes | os.PathLike) or any(given.get(name) for name in UNUSUAL):
            return False
        program = _program_of([os.fsdecode(word) for word in command])
        if program is None or not given["close_fds"] or given.get("process_group", -1) != -1:
            return False
        # A server has the network in which it was started.
        if _network() != NETWORK:
            return False
        server = _server_of(program.module)
        if server is None or not server.takes(given["env"]):
            return False
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        standard = [number if end == -1 else end for number, end in enumerate(ends)]
        passed = sorted(given["pass_fds"])
        environment = os.environ if given["env"] is None else given["env"]
        orders = {
            **asdict(program),
            "parent": os.getpid(),
            "umask": given.get("umask", -1),
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            "folder": os.fspath(given["cwd"] or Path.cwd()),
            "passed": passed,
            "session": bool(given["start_new_session"]),
        }
        with _lock:
            self.pid = server.fork(orders, [*standard, *passed])
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]
        return True


def _server_of(module: str) -> _Server | None:
    """Returns the server of a program, started with the first request of the main thread, whose child it has to be."""
    with _lock:
        if module not in _servers and threading.current_thread() is threading.main_thread():
            _servers[module] = _Server(module)
        return _servers.get(module)


def _network() -> str:
    """Returns the network namespace of this thread; see `machines`."""
    return str(Path("/proc/thread-self/ns/net").readlink())


def _close() -> None:
    while _servers:
        _servers.popitem()[1].close()


def _read(control: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = control.recv(size - len(content))
        if not part:
            raise EOFError("The other end has closed.")
        content += part
    return content


def _serve(module: str) -> None:
    """Imports a program and forks it for each request; returns in a fork, when it has run."""
    for name in (f"{module}.__main__", *ALSO_IMPORTED.get(module, ())):
        importlib.import_module(name)
    control = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    gc.collect()
    gc.freeze()
    control.sendall(b"R")
    while True:
        try:
            size, descriptors, _, _ = socket.recv_fds(control, LENGTH_BYTES, 16)
        except ConnectionResetError:  # closed before anybody asked whether it is ready
            return
        if not size:
            return
        orders = json.loads(_read(control, int.from_bytes(size, "big")))
        pid = _fork_sibling()
        if pid == 0:
            control.close()
            _run(module, orders, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(pid.to_bytes(LENGTH_BYTES, "big"))


def _fork_sibling() -> int:
    """Forks a child of this process's parent; returns 0 in it."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = libc.syscall(SYS_CLONE[os.uname().machine], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "cannot fork")
    return int(pid)


def _run(module: str, orders: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Runs the program as `python -m` does."""
    from fulmen_service_kit.fork_server import _set_title

    if orders["session"]:
        os.setsid()
    if orders["umask"] != -1:
        os.umask(orders["umask"])
    if orders["is_tied"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != orders["parent"]:
            os._exit(PARENT_IS_GONE)
    # Their numbers here may be those that they must get.
    moved = [os.dup(descriptor) for descriptor in descriptors]
    kept = [0, 1, 2, *orders["passed"]]
    above = max(moved + kept) + 1
    moved = [_moved(descriptor, above + index) for index, descriptor in enumerate(moved)]
    for descriptor, number in zip(moved, kept, strict=True):
        os.dup2(descriptor, number)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in kept:
            with suppress(OSError):
                os.close(int(entry.name))
    os.environ.clear()
    os.environ.update(orders["environment"])
    os.environ.setdefault(FORK_SUPPORT, "0")  # as importing the service kit does
    os.chdir(orders["folder"])
    # The first is that of the working directory.
    sys.path[:1] = [] if orders["is_safe"] else [orders["folder"]]
    if os.environ.get(UNBUFFERED):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv = [module, *orders["arguments"]]
    _set_title([sys.executable, *(["-P"] if orders["is_safe"] else []), "-m", module, *orders["arguments"]])
    sys.modules.pop(f"{module}.__main__", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _moved(descriptor: int, number: int) -> int:
    os.dup2(descriptor, number)
    os.close(descriptor)
    return number


if __name__ == "__main__":
    _serve(sys.argv[1])
