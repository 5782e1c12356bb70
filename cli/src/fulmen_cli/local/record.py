"""The record of a running stack, `stack.json` in the state directory, replaced atomically.

Holds no secret: tokens are in files of mode 0600 beside it, which it names.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from fulmen.connection import LocalStack
from fulmen.rpc.services import Targets
from fulmen_cli.local.errors import StackNotRunningError, StackRunningError

__all__ = [
    "ServiceRecord",
    "ServiceState",
    "StackFolder",
    "StackRecord",
    "StackState",
    "find_running",
    "make_private",
    "private_opener",
    "write_atomically",
]

DEFAULT_STATE_DIR: Final = ".fulmen"
RECORD_VERSION: Final = 1
PORTS_FILE: Final = "ports.json"
LOCK_PATIENCE_S: Final = 1.0
LOCK_INTERVAL_S: Final = 0.05
_PRIVATE_MODE: Final = 0o600
PRIVATE_FOLDER_MODE: Final = 0o700


class StackState(StrEnum):
    """State of the stack."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class ServiceState(StrEnum):
    """State of a process of the stack."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    """One process of the stack.

    Attributes:
        message: Why it failed, or why it was last restarted.
        retry_at: When it is started again, ISO 8601; empty unless it waits for that.
    """

    name: str
    state: ServiceState
    ports: dict[str, int]
    pid: int | None = None
    restarts: int = 0
    log: str = ""
    message: str = ""
    retry_at: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """The stack: its addresses, state and processes. `keeper_pid` restarts the supervisor; 0 if nothing does."""

    state: StackState
    supervisor_pid: int
    version: str
    targets: dict[str, str]
    client_token_file: str
    services: tuple[ServiceRecord, ...]
    started_at: str = ""
    message: str = ""
    fleet: str = ""
    keeper_pid: int = 0
    record_version: int = RECORD_VERSION

    def service(self, name: str) -> ServiceRecord:
        """Returns one process of the stack by name.

        Raises:
            KeyError: if there is none of this name.
        """
        for each in self.services:
            if each.name == name:
                return each
        raise KeyError(name)


@dataclasses.dataclass(frozen=True, slots=True)
class StackFolder:
    """The state directory of a local stack."""

    path: Path

    @property
    def record_file(self) -> Path:
        """The file that describes the running stack."""
        return self.path / "stack.json"

    @property
    def lock_file(self) -> Path:
        """The file that the supervisor keeps locked while it lives."""
        return self.path / "supervisor.lock"

    @property
    def logs(self) -> Path:
        """The folder of the log files."""
        return self.path / "logs"

    @property
    def database(self) -> Path:
        """The folder of the embedded PostgreSQL."""
        return self.path / "postgres"

    @property
    def ready_files(self) -> Path:
        """The directory in which services announce that they are ready."""
        return self.path / "ready"

    def log_file(self, service: str) -> Path:
        """The log of one process of the stack."""
        return self.logs / f"{service}.log"

    def create(self) -> None:
        """Creates the directories, unless they exist, for their owner alone and ignored by git."""
        make_private(self.path)
        for folder in (self.logs, self.ready_files):
            folder.mkdir(mode=PRIVATE_FOLDER_MODE, exist_ok=True)

    def is_running(self) -> bool:
        """Returns whether a supervisor holds the lock; unlike a process id, a lock is never stale."""
        try:
            with self.lock_file.open(encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def is_up(self, record: StackRecord | None) -> bool:
        """Returns whether a recorded stack's supervisor runs, or the process that restarts it."""
        return self.is_running() or (record is not None and self.is_kept(record))

    def is_kept(self, record: StackRecord) -> bool:
        """Returns whether the process lives that restarts the supervisor of a recorded stack, if it has one."""
        if not record.keeper_pid:
            return False
        try:
            os.kill(record.keeper_pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        command = Path(f"/proc/{record.keeper_pid}/cmdline")
        # Process ids are used again.
        return not command.exists() or str(self.path).encode() in command.read_bytes()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the lock of the existing directory.

        Raises:
            StackRunningError: if another one holds it.
        """
        with self.lock_file.open("a", encoding="utf-8") as lock:
            deadline = time.monotonic() + LOCK_PATIENCE_S
            while not _try_lock(lock.fileno()):
                # `is_running` takes the lock for an instant; only a supervisor keeps it.
                if time.monotonic() > deadline:
                    raise StackRunningError(
                        f"A stack is already running on {self.path}: see `fulmen status`, or stop it with `fulmen down`."
                    )
                time.sleep(LOCK_INTERVAL_S)
            yield

    def write(self, record: StackRecord) -> None:
        """Replaces the record of the stack."""
        write_atomically(self.record_file, json.dumps(dataclasses.asdict(record), indent=2) + "\n")

    def read(self) -> StackRecord | None:
        """Returns the latest record; None without one, or if it is of another release."""
        try:
            data = json.loads(self.record_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return None
        return _decode(data) if data.get("record_version") == RECORD_VERSION else None

    def keep_ports(self, ports: Mapping[str, int]) -> None:
        """Saves the ports for the next start, which deletes the record."""
        write_atomically(self.path / PORTS_FILE, json.dumps(dict(ports), indent=2) + "\n")

    def last_ports(self) -> dict[str, int]:
        """Returns the ports of the last start by name; empty on the first."""
        try:
            known = json.loads((self.path / PORTS_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return {str(name): int(port) for name, port in known.items()}

    def read_running(self) -> StackRecord:
        """Returns the record of the running stack.

        Raises:
            StackNotRunningError: if none runs.
        """
        record = self.read()
        if record is None or not self.is_running():
            raise StackNotRunningError(f"No stack is running on {self.path}: start one with `fulmen up`.")
        return record


def find_running(state_dir: Path) -> LocalStack | None:
    """Returns the stack that runs on a state directory; None if none does.

    The entry point `fulmen.local_stack`, by which the SDK finds it.
    """
    folder = StackFolder(state_dir.resolve())
    record = folder.read() if folder.is_running() else None
    if record is None:
        return None
    targets = Targets(
        store=record.targets["store"], algorithm=record.targets["algorithm"], llm_proxy=record.targets["llm_proxy"]
    )
    return LocalStack(targets=targets, token_file=Path(record.client_token_file))


def make_private(folder: Path) -> None:
    """Makes a state directory, unless it exists, for its owner alone; git takes nothing of it."""
    folder.mkdir(mode=PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)
    folder.chmod(PRIVATE_FOLDER_MODE)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        write_atomically(ignore, "*\n", private=True)


def private_opener(path: str, flags: int) -> int:
    """Opens a file that is created for its owner alone; the `opener` of `open`."""
    return os.open(path, flags, _PRIVATE_MODE)


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Replaces a file atomically.

    Args:
        path: the file.
        text: its whole content.
        private: readable by its owner only.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE_MODE if private else 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _decode(data: dict[str, Any]) -> StackRecord:
    services = tuple(ServiceRecord(**{**each, "state": ServiceState(each["state"])}) for each in data["services"])
    return StackRecord(**{**data, "state": StackState(data["state"]), "services": services})
