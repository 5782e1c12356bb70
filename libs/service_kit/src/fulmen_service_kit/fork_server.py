"""Imports modules once and forks a process for each request, which starts with the modules in place. Linux only.

`python -m fulmen_service_kit.fork_server MODULE...`, with a socket of `forks.ForkServer` as standard input.

Invariants: it forks only while it has a single thread, since a child would wait for ever for a lock that another thread held.
It never reads what a process is given: the child reads its own arguments and environment, after the fork. A forked process
ends with the requester that holds its line, and with the server.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from fulmen_service_kit import GRPC_FORKS

FORK, CONNECT = b"F", b"C"
DESCRIPTORS = 5
"""Descriptors of a request to fork: orders, standard input, output and error, and the line. More are left to
the forked process, such as a connection to the server."""
MAX_INHERITED = 3
CONNECTION_VARIABLE = "FULMEN_FORK_SERVER_FD"
"""Variable with the descriptor of a process's connection to the server."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15
PARENT_IS_GONE = 3
ARG_START, ARG_END = 45, 46
"""Places of the command line's addresses in /proc/self/stat, from the state on; see proc_pid_stat(5)."""


@dataclass(slots=True, kw_only=True)
class _Child:
    """A forked process that has not been reaped."""

    pid: int
    pidfd: int
    line: socket.socket


class _Server:
    """Answers requests until the first requester leaves."""

    def __init__(self, control: socket.socket) -> None:
        self._main = control
        self._controls = {control.fileno(): control}
        self._lines: dict[int, _Child] = {}
        self._pidfds: dict[int, _Child] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> list[int]:
        """Returns nothing when the first requester has left; in a forked process, the descriptors that are left to it."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._controls:
                    left = self._take(self._controls[descriptor])
                    if left or self._main.fileno() < 0:
                        return left
                elif descriptor in self._pidfds:
                    self._reap(self._pidfds[descriptor])
                elif descriptor in self._lines:
                    self._obey(self._lines[descriptor])

    def _take(self, control: socket.socket) -> list[int]:
        """Takes a request; returns what is left to the forked process, in it."""
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1, DESCRIPTORS + MAX_INHERITED)
        except OSError:
            message, descriptors = b"", []
        if message == FORK and len(descriptors) >= DESCRIPTORS:
            return self._fork(descriptors)
        if message == CONNECT and len(descriptors) == 1:
            added = socket.socket(fileno=descriptors[0])
            self._controls[added.fileno()] = added
            self._poll.register(added, select.POLLIN)
            return []
        for descriptor in descriptors:
            os.close(descriptor)
        if not message:
            self._poll.unregister(control)
            del self._controls[control.fileno()]
            control.close()
        return []

    def _fork(self, descriptors: list[int]) -> list[int]:
        orders, standard, line, inherited = descriptors[0], descriptors[1:4], descriptors[4], descriptors[5:]
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._forget()
            os.close(line)
            _begin(server, standard)
            return [orders, *inherited]
        for descriptor in (orders, *standard, *inherited):
            os.close(descriptor)
        child = _Child(pid=pid, pidfd=os.pidfd_open(pid), line=socket.socket(fileno=line))
        self._pidfds[child.pidfd] = self._lines[child.line.fileno()] = child
        self._poll.register(child.pidfd, select.POLLIN)
        self._poll.register(child.line, select.POLLIN)
        _send(child.line, {"pid": pid})
        return []

    def _obey(self, child: _Child) -> None:
        """Sends the signals that the requester asks for; kills the process and its group if the requester has
        ended."""
        try:
            asked = child.line.recv(64)
        except OSError:
            asked = b""
        for number in asked or bytes([signal.SIGKILL]):
            try:
                os.killpg(child.pid, number)
            except OSError:
                continue  # it has ended, or has not made its group yet
        if not asked:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            self._poll.unregister(child.line)
            del self._lines[child.line.fileno()]
            child.line.close()

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._poll.unregister(child.pidfd)
        del self._pidfds[child.pidfd]
        os.close(child.pidfd)
        if child.line.fileno() >= 0:
            self._poll.unregister(child.line)
            del self._lines[child.line.fileno()]
            _send(child.line, {"status": os.waitstatus_to_exitcode(status)})
            child.line.close()

    def _forget(self) -> None:
        """Closes everything of the server in a forked process."""
        for control in self._controls.values():
            control.close()
        for child in self._pidfds.values():
            os.close(child.pidfd)
            child.line.close()


def _begin(server: int, standard: list[int]) -> None:
    """Makes a forked process independent of the server, except that it ends with it."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(PARENT_IS_GONE)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run(orders: int, *inherited: int) -> None:
    """Runs the module that the orders name, as `python -m` does."""
    with open(orders, encoding="utf-8") as pipe:
        given = json.load(pipe)
    os.environ.clear()
    os.environ.update({GRPC_FORKS: "0", **given["environment"]})
    os.environ.update({name: str(number) for name, number in zip(given["inherited"], inherited, strict=True)})
    os.chdir(given["folder"])
    module, arguments = given["module"], given["arguments"]
    sys.argv = [module, *arguments]
    _set_title([sys.executable, "-m", module, *arguments])
    del given
    # Imported before, but not run; runpy would warn.
    sys.modules.pop(f"{module}.__main__", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_title(words: list[str]) -> None:
    """Shows another command line in `ps`, cut to the length of the server's own. Never fails."""
    _prctl(PR_SET_NAME, ctypes.c_char_p(words[2].rpartition(".")[2].encode()[:15]))
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    start, end = int(fields[ARG_START]), int(fields[ARG_END])
    if 0 < start < end:
        title = "\0".join(words).encode()[: end - start - 1]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _prctl(option: int, value: object) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _send(line: socket.socket, message: dict[str, int]) -> None:
    try:
        line.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return  # the requester has ended, which the next poll shows


def main() -> None:
    """Imports the modules that the command line names, and serves."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in " ".join(sys.argv[1:]).split():
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise SystemExit(f"The fork server has {threads} threads after its imports, and must have one.")
    control = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    gc.collect()
    gc.freeze()  # the collector would write to the pages that forked processes share
    control.send(b"R")
    left = _Server(control).run()
    if left:
        _run(*left)


if __name__ == "__main__":
    main()
