"""`fulmen up`, `status`, `down` with the real services: restart keeps what was accepted, nothing is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fulmen_cli.local.postgres import EmbeddedPostgres
from fulmen_cli.local.record import StackFolder, StackRecord, StackState
from tests.support.ports import free_ports
from tests.support.stack import own_ports

pytestmark = [pytest.mark.serial, pytest.mark.timeout(240)]

COMMAND_LIMIT_S = 180
END_LIMIT_S = 60.0


@pytest.fixture
def state(short_tmp_path: Path) -> Iterator[Path]:
    folder = short_tmp_path / "s"
    own_ports(folder)
    yield folder
    fulmen("down", "--state-dir", str(folder), check=False)


def fulmen(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the command; by default a failure of it is a failure of the test."""
    done = subprocess.run(
        [sys.executable, "-m", "fulmen_cli", *arguments],
        capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def pids(folder: Path) -> dict[str, int]:
    record = StackFolder(folder).read()
    assert record is not None
    return {service.name: service.pid for service in record.services if service.pid is not None}


def await_end(pid: int) -> bool:
    """Waits until a process has ended; returns False if it did not within the limit."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], END_LIMIT_S)[0])
    finally:
        os.close(pidfd)


def test_a_stack_starts_says_how_it_does_keeps_what_it_accepted_and_stops(state: Path) -> None:
    there = ("--state-dir", str(state))
    port = free_ports()[0]
    started = fulmen("up", "--port", f"store={port}", *there)
    assert "Ready." in started.stdout

    status = json.loads(fulmen("status", "--output", "json", *there).stdout)
    assert status["healthy"]
    assert set(status["health"]) == {"store", "llm_proxy", "algorithm", "console", "runner-1"}
    assert status["queue"] is not None
    assert called_as_json(state, "fulmen.store.v1.RolloutService/ListRollouts") == {}
    assert "algorithms" in called_as_json(state, "fulmen.algorithm.v1.TrainingRunService/ListAlgorithms")

    opened = fulmen("open", "queue", "--print", *there).stdout.strip()
    address, _, code = opened.partition("#code=")
    assert address.endswith("/projects/default/queue")
    session = urllib.request.Request(
        f"{address.removesuffix('/projects/default/queue')}/session",
        data=json.dumps({"code": code}).encode(), headers={"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(session, timeout=10) as answer:
        assert json.loads(answer.read())["role"] == "admin"

    again = fulmen("up", *there)
    assert "already running" in again.stdout
    assert readable_by_others(state) == []
    assert (state / ".gitignore").read_text() == "*\n"

    first = pids(state)
    created = json.loads(
        fulmen("rollout", "create", "resources/agent.none/versions/1", "--task", "{}", "-o", "json", *there).stdout
    )

    fulmen("down", *there)
    assert all(await_end(pid) for pid in first.values())
    assert fulmen("status", *there, check=False).returncode == 1

    fulmen("up", *there)
    shown = json.loads(fulmen("rollout", "show", created[0]["name"], "-o", "json", *there).stdout)
    assert shown["name"] == created[0]["name"]
    # A client that waits for the stack knows it by the ports that it had.
    assert StackFolder(state).read_running().service("store").ports["store"] == port


def called_as_json(folder: Path, rpc: str) -> object:
    """Calls an rpc through the console with the token of the command line, as curl does."""
    record = StackFolder(folder).read_running()
    request = urllib.request.Request(
        f"{record.targets['console_http']}/{rpc}",
        data=b"{}",
        headers={
            "Authorization": f"Bearer {(folder / 'client.token').read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def readable_by_others(folder: Path) -> list[str]:
    """Returns the files and folders of a state directory that others than their owner may read, sockets excepted."""
    entries = (folder, *folder.rglob("*"))
    return [str(each) for each in entries if each.stat().st_mode & 0o077 and not each.is_socket()]


@pytest.mark.long(short=True)
def test_whatever_dies_or_hangs_is_started_again_and_what_cannot_be_leaves_nothing_behind(state: Path) -> None:
    there = ("--state-dir", str(state))
    fulmen("up", *there)
    folder = StackFolder(state)
    before = folder.read_running()
    store = before.service("store").pid
    assert store is not None

    os.kill(store, signal.SIGKILL)
    assert await_end(store)
    restarted = await_service(folder, "store", not_pid=store)
    assert restarted.service("store").ports == before.service("store").ports
    assert restarted.service("store").restarts == 1
    assert "killed by SIGKILL" in fulmen("status", *there).stdout

    # A service that is stopped, and the database, in which connections are open.
    runner = before.service("runner-1").pid
    assert runner is not None
    os.kill(runner, signal.SIGSTOP)
    postmaster = int((state / "postgres" / "postmaster.pid").read_text().split("\n")[0])
    os.kill(postmaster, signal.SIGTERM)
    assert "hung" in await_service(folder, "runner-1", not_pid=runner).service("runner-1").message
    assert await_end(postmaster)
    await_ready(folder)

    # The supervisor: the services end with it, and come back with it.
    children = pids(state)
    os.kill(restarted.supervisor_pid, signal.SIGKILL)
    assert all(await_end(pid) for pid in children.values())
    await_ready(folder, not_supervisor=restarted.supervisor_pid)

    # What restarts the supervisor: nothing is left, and `fulmen up` starts anew.
    record = folder.read_running()
    children = pids(state)
    os.kill(record.keeper_pid, signal.SIGKILL)
    assert all(await_end(pid) for pid in (*children.values(), record.supervisor_pid))
    assert not folder.is_running()
    assert "Ready." in fulmen("up", *there).stdout


def test_a_port_in_use_is_one_clear_error_and_nothing_is_started(state: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failed = fulmen("up", "--state-dir", str(state), "--port", f"store={port}", check=False)

    assert failed.returncode != 0
    assert failed.stderr.startswith(f"error: Port in use: store={port}.")
    assert "Traceback" not in failed.stderr
    assert not StackFolder(state).is_running()
    assert not EmbeddedPostgres(state / "postgres").log_file.exists()


@pytest.mark.long
def test_two_stacks_that_start_at_the_same_moment_and_would_like_the_same_ports_both_run(
    state: Path, short_tmp_path: Path
) -> None:
    other = short_tmp_path / "other"
    other.mkdir()
    StackFolder(other).keep_ports(StackFolder(state).last_ports())
    try:
        with ThreadPoolExecutor() as pool:
            commands = [pool.submit(fulmen, "up", "--state-dir", str(folder)) for folder in (state, other)]
            assert all("Ready." in command.result().stdout for command in commands)
        ports = [set(StackFolder(folder).last_ports().values()) for folder in (state, other)]
        assert ports[0].isdisjoint(ports[1])
    finally:
        fulmen("down", "--state-dir", str(other), check=False)


def await_ready(folder: StackFolder, *, not_supervisor: int = 0) -> None:
    """Waits until everything is ready, under another supervisor than this one."""
    deadline = time.monotonic() + 2 * END_LIMIT_S
    while time.monotonic() < deadline:
        record = folder.read()
        is_other = record is not None and record.supervisor_pid != not_supervisor
        if record is not None and is_other and {record.state, *(each.state for each in record.services)} == {"ready"}:
            return
        time.sleep(0.05)
    raise AssertionError(f"the stack did not come back: {record}")


def await_service(folder: StackFolder, name: str, *, not_pid: int) -> StackRecord:
    """Waits until a service is ready again under another process id."""
    deadline = time.monotonic() + END_LIMIT_S
    while time.monotonic() < deadline:
        record = folder.read_running()
        service = record.service(name)
        if service.state == "ready" and service.pid not in (None, not_pid):
            return record
        time.sleep(0.05)
    raise AssertionError(f"{name} did not come back: {record}")


HOLDS = """
import sys, time
from pathlib import Path
from fulmen_cli.local.record import StackFolder
with StackFolder(Path(sys.argv[1])).hold():
    print("holds", flush=True)
    time.sleep(3600)
"""


def test_the_database_that_a_supervisor_left_behind_when_it_was_stopped_is_stopped(short_tmp_path: Path) -> None:
    folder = StackFolder(short_tmp_path / "s")
    folder.create()
    server = EmbeddedPostgres(folder.database)
    server.start()
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(folder.path)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"holds\n"
        folder.write(
            StackRecord(
                state=StackState.READY,
                supervisor_pid=supervisor.pid,
                version="",
                targets={},
                client_token_file="",
                services=(),
            )
        )
        try:
            fulmen("down", "--state-dir", str(folder.path))
            assert not (folder.database / "postmaster.pid").exists()
        finally:
            supervisor.kill()
            server.stop()
