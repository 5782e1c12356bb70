"""The guardian process: starts commands and kills all their descendants. A script without site packages; see `guardian`.

Its argument is the file of `fulmen_service_kit.isolation.confine`, which confines each command.

The guardian forks a keeper for each command. The keeper is the command's parent and, on Linux, the subreaper of all its
descendants: one that leaves its process group or session (`setsid`, a double fork) is reparented to the keeper when its
parent exits, and is killed like the others. A keeper exits when all descendants of its command are dead. It starts
killing when the command exits, on request, and when its connection to the runner closes, which the runner's death
causes. Descendants of a killed keeper are reparented to the guardian, which kills them.

Protocol. To the guardian: one byte with a keeper's connection as ancillary file descriptor.
To a keeper: an eight-byte length with the command's file descriptors (0, 1 and so on), that many bytes of JSON, then `T`
for SIGTERM to the group or `K` to kill all. From a keeper: the line `failed <errno>`, or `started <keeper> <group>` and
later `exited <code>`, negative for a signal; then the connection closes when all descendants are dead.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Confinement = Mapping[str, Any]
    Confine = Callable[[Confinement, Mapping[str, str]], Mapping[str, str]]
    Request = tuple[list[str], str, Mapping[str, str], Confinement]
    """Arguments, working directory, environment, argument of `confine`."""

MAX_FILES = 16
LENGTH_BYTES = 8
KILL_PAUSE_S = 0.02
OOM_SCORE = b"500"
"""oom_score_adj of commands (0 to 1000): the kernel kills them before the runner when memory runs out."""

NOTHING: Request = ([], "", {}, {})

_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LINUX = sys.platform == "linux"


def main() -> None:
    """Serves until the runner is dead and all keepers have exited."""
    runner = _connection()
    # Loaded once; keepers are forked with it.
    confine = _confine_of(sys.argv[1])
    wake = _begin()
    keepers: set[int] = set()
    gc.freeze()
    open_ = True
    while open_ or keepers or _children():
        ready, _, _ = select.select([wake, runner] if open_ else [wake], [], [])
        if runner in ready:
            _, files, _, _ = socket.recv_fds(runner, 1, 1)
            if files:
                _fork_keeper(files[0], keepers, (runner, wake), confine)
            else:
                open_ = False
        if wake in ready:
            wake.recv(4096)
            _reap_keepers(keepers)


def _connection() -> socket.socket:
    """Moves the connection to the runner from standard input, which keepers would inherit."""
    runner = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return runner


def _confine_of(file: str) -> Confine:
    sys.path.insert(0, str(Path(file).parent))
    found: Confine = importlib.import_module("confine").confine
    del sys.path[0]
    return found


def _begin() -> socket.socket:
    """Becomes a subreaper; returns a socket that is readable when a child has exited."""
    if _LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Detached, so that it stays open.
    signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
    return wake


def _fork_keeper(
    connection: int,
    keepers: set[int],
    unwanted: tuple[socket.socket, ...],
    confine: Confine,
) -> None:
    try:
        keeper = os.fork()
    except OSError:
        # The runner sees the connection close.
        os.close(connection)
        return
    if keeper:
        keepers.add(keeper)
        os.close(connection)
        return
    try:
        for each in unwanted:
            each.close()
        os.set_inheritable(connection, False)
        _Keeper(socket.socket(fileno=connection), confine).keep()
    finally:
        os._exit(0)


def _reap_keepers(keepers: set[int]) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            break
        keepers.discard(pid)
    # Other children are descendants of a killed keeper.
    for child in _children():
        if child not in keepers:
            _kill_tree(child)


class _Keeper:
    """Parent of one command."""

    def __init__(self, runner: socket.socket, confine: Confine) -> None:
        self._runner = runner
        self._confine = confine
        self._group = 0
        self._killing = False

    def keep(self) -> None:
        """Runs the command; returns when all its descendants are dead."""
        wake = _begin()
        request, files = _receive(self._runner)
        if not files:
            return
        self._start(request, files)
        while self._group or _children():
            waited: list[socket.socket] = [wake] if self._killing else [wake, self._runner]
            ready, _, _ = select.select(waited, [], [], KILL_PAUSE_S if self._killing else None)
            if self._runner in ready:
                self._obey(_order(self._runner))
            if wake in ready:
                wake.recv(4096)
            self._reap()
            if self._killing:
                self._kill()

    def _start(self, request: Request, files: list[int]) -> None:
        read, write = os.pipe()
        group = os.fork()
        if not group:
            _become(request, files, write, self._confine)
        os.close(write)
        for each in files:
            os.close(each)
        error = os.read(read, 16)
        os.close(read)
        if error:
            os.waitpid(group, 0)
            self._send(b"failed %s\n" % error)
            return
        self._group = group
        self._send(b"started %d %d\n" % (os.getpid(), group))

    def _obey(self, order: bytes) -> None:
        if order == b"T":
            if self._group:
                _signal_group(self._group, signal.SIGTERM)
        else:
            self._killing = True

    def _kill(self) -> None:
        if self._group:
            _signal_group(self._group, signal.SIGKILL)
        for child in _children():
            _kill_tree(child)

    def _reap(self) -> None:
        while True:
            pid, code = _reap_child(self._group)
            if not pid:
                return
            if pid == self._group:
                self._group = 0
                self._killing = True
                self._send(b"exited %d\n" % code)

    def _send(self, line: bytes) -> None:
        try:
            self._runner.sendall(line)
        except OSError:
            self._killing = True


def _receive(runner: socket.socket) -> tuple[Request, list[int]]:
    """Receives a command and its files; no files if the runner has closed the connection."""
    header, files, _, _ = socket.recv_fds(runner, LENGTH_BYTES, MAX_FILES)
    for each in files:
        os.set_inheritable(each, False)
    if not header:
        return NOTHING, []
    missing = int.from_bytes(header, "big")
    parts = []
    while missing:
        part = runner.recv(min(missing, 1 << 20))
        if not part:
            return NOTHING, []
        parts.append(part)
        missing -= len(part)
    document = json.loads(b"".join(parts))
    return (document["argv"], document["cwd"], document["environment"], document["confinement"]), files


def _become(request: Request, files: list[int], errors: int, confine: Confine) -> None:
    """Executes the command in this process; never returns."""
    import fcntl

    argv, cwd, environment, confinement = request
    number = errno.EINVAL
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        # Above the descriptors that the command gets.
        errors, *files = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3 * MAX_FILES) for each in (errors, *files)]
        for target, each in enumerate(files):
            os.dup2(each, target)
        _prefer_for_oom()
        # Including those inherited from the runner: a shell makes background processes ignore SIGQUIT.
        for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(each, signal.SIG_DFL)
        if confinement:
            environment = confine(confinement, environment)
        os.chdir(cwd)
        os.execvpe(argv[0], argv, environment)  # noqa: S606  # Starting programs is its purpose.
    except OSError as error:
        number = error.errno or number
    finally:
        os.write(errors, b"%d" % number)
        os._exit(127)


def _prefer_for_oom() -> None:
    try:
        Path("/proc/self/oom_score_adj").write_bytes(OOM_SCORE)
    except OSError:
        return


def _order(runner: socket.socket) -> bytes:
    try:
        return runner.recv(1)
    except OSError:
        return b""


def _reap_child(group: int) -> tuple[int, int]:
    """Reaps an exited child; returns its process id and exit code, 0 and 0 if there is none.

    When the leader of the group has exited, the group is killed.
    """
    try:
        if _LINUX:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_pid == group:
                # Before it is reaped: afterwards the id may be reused.
                _signal_group(group, signal.SIGKILL)
            pid, status = os.waitpid(ended.si_pid, 0) if ended is not None else (0, 0)
        else:
            pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0
    if pid == group and not _LINUX:
        _signal_group(group, signal.SIGKILL)
    return pid, os.waitstatus_to_exitcode(status) if pid else 0


def _children() -> list[int]:
    """Returns the children of this process; Linux only."""
    if not _LINUX:
        return []
    pid = os.getpid()
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()]
    except FileNotFoundError:
        return [each for each in _processes() if _parent(each) == pid]


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _kill_tree(child: int) -> None:
    """Kills a child, with its group if it leads one. Its children are reparented to this process."""
    try:
        if os.getpgid(child) == child:
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    except OSError:
        return


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except OSError:
        # It is gone, or on macOS a zombie.
        return


if __name__ == "__main__":
    main()
