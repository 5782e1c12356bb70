"""Starts a supervised stack beside this process, for `fulmen up` and for programs that need a stack for a while."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fulmen.connection import LocalStack
from fulmen_cli.local.errors import StackError
from fulmen_cli.local.record import StackFolder, StackRecord, StackState, find_running, private_opener
from fulmen_cli.local.services import require_installed

__all__ = ["start_supervisor", "started", "wait_for_end", "wait_until_ready"]

START_LIMIT_S: Final = 240.0
STOP_LIMIT_S: Final = 240.0
POLL_INTERVAL_S: Final = 0.1
SHOWN_LINES: Final = 50


def start_supervisor(folder: StackFolder, settings: Mapping[str, object], *, tied: bool) -> subprocess.Popen[bytes]:
    """Starts the supervisor, and what restarts it, in a session of its own; if tied, both die with this process."""
    folder.record_file.unlink(missing_ok=True)
    python = [sys.executable, "-P", "-m"]
    command = [*python, "fulmen_service_kit.heartbeat", "--restart"]
    command += [*python, "fulmen_cli.local.supervisor", json.dumps(dict(settings))]
    if tied:
        from fulmen_service_kit import launch

        command = [sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid()), *command]
    with open(folder.log_file("supervisor"), "wb", opener=private_opener) as log:  # Path.open has none.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=folder.path
        )


def wait_until_ready(
    folder: StackFolder, supervisor: subprocess.Popen[bytes], *, show: Callable[[StackRecord], None]
) -> StackRecord:
    """Waits until all services are ready; gives every record meanwhile to `show`.

    Raises:
        StackError: if the supervisor gives up, or does not come to an end within 4 minutes.
    """
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        ended = supervisor.poll() is not None
        record = folder.read()
        if record is not None and record.keeper_pid == supervisor.pid:
            show(record)
            if record.state is StackState.READY:
                return record
        if ended:
            raise StackError(_why_it_failed(folder))
        if time.monotonic() > deadline:
            supervisor.terminate()
            raise StackError(f"The stack was not ready after {START_LIMIT_S:.0f} s and was stopped.")
        time.sleep(POLL_INTERVAL_S)


def wait_for_end(supervisor: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a supervisor that was asked to stop.

    Raises:
        StackError: if it had to be killed.
    """
    try:
        supervisor.wait(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        raise StackError(f"The stack did not stop within {STOP_LIMIT_S:.0f} s and was killed.") from None


@contextmanager
def started(
    state_dir: Path, *, runners: int = 1, slots: int | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[LocalStack]:
    """Runs a stack on free ports for the duration of a block; it dies with this process at the latest.

    The entry point `fulmen.local_stack`, by which the SDK starts one.

    Raises:
        StackError: if it does not start.
    """
    require_installed()
    folder = StackFolder(state_dir.resolve())
    folder.create()
    settings = {
        "state_dir": str(folder.path),
        "runners": runners,
        "slots": slots,
        "use_default_ports": False,
        "environment": dict(environment or {}),
    }
    supervisor = start_supervisor(folder, settings, tied=True)
    try:
        wait_until_ready(folder, supervisor, show=lambda record: None)
        stack = find_running(folder.path)
        assert stack is not None  # It is ready, and its supervisor holds the lock.
        yield stack
    finally:
        supervisor.terminate()
        wait_for_end(supervisor)


def _why_it_failed(folder: StackFolder) -> str:
    record = folder.read()
    if record is not None and record.message:
        return record.message
    log = folder.log_file("supervisor")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join(lines).strip().removeprefix("error: ") or "The supervisor ended without a message."
