"""`fulmen doctor`: each check fails on what it is there for, and says what to do."""

from __future__ import annotations

import base64
import datetime
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulmen.algorithm.v1.training_run_pb2 import TrainingRun
from fulmen.llm_proxy.v1.backend_pb2 import BackendHealth
from fulmen_cli.doctor import machine as checks
from fulmen_cli.doctor.deployment import backends, clocks, engines, token
from fulmen_cli.local.record import StackFolder, StackRecord, StackState
from fulmen_cli.main import app
from tests.support.cli.command_runner import CliRunner

NOW = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)


def record(*, version: str = "0.1.0", started_at: str = "2026-05-01T11:00:00+00:00") -> StackRecord:
    return StackRecord(
        state=StackState.READY,
        supervisor_pid=1,
        version=version,
        targets={},
        client_token_file="",
        services=(),
        started_at=started_at,
        message="",
    )


def test_everything_is_reported_as_json_too_with_what_to_do(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--output", "json", "--state-dir", str(tmp_path)])

    found = {each["what"]: each for each in json.loads(result.stdout)}
    looked_at = {"python", "versions", "disk", "memory", "clock", "ports", "stack", "tracing", "docker", "node", "gpu"}
    assert looked_at <= found.keys()
    assert found["stack"]["advice"] == "Start one with `fulmen up`."
    assert all(each["advice"] for each in found.values() if each["ok"] is False)


def test_little_memory_is_a_failure(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:     100000 kB\n")

    assert checks.memory(meminfo).ok is False
    assert checks.memory(tmp_path / "none").ok is None


@pytest.mark.parametrize(
    ("now", "started_at", "ok"),
    [
        (NOW, "2026-05-01T11:00:00+00:00", True),
        (NOW, "2026-05-01T13:00:00+00:00", False),  # The stack was started in what is now the future.
        (datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC), "1970-01-01T00:00:00+00:00", False),
    ],
)
def test_a_clock_that_cannot_be_right_is_a_failure(now: datetime.datetime, started_at: str, ok: bool) -> None:
    assert checks.clock(record(started_at=started_at), now).ok is ok


def test_a_stack_of_another_release_is_a_failure() -> None:
    assert checks.stack_version(record()).ok is True
    older = checks.stack_version(record(version="0.0.9"))
    assert older.ok is False
    assert "fulmen down && fulmen up" in older.advice


def test_a_docker_engine_is_found_where_docker_host_says(short_tmp_path: Path) -> None:
    path = str(short_tmp_path / "d.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nApi-Version: 1.47\r\nContent-Length: 2\r\n\r\nOK")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        found = checks.docker({"DOCKER_HOST": f"unix://{path}"})
        thread.join(10)

    assert (found.ok, "1.47" in found.text) == (True, True)
    assert checks.docker({"DOCKER_HOST": f"unix://{path}.none"}).ok is None


def bearer(**claims: object) -> str:
    """Returns what looks like a token with these claims."""
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"header.{payload}.signature"


@pytest.mark.parametrize(
    ("days", "ok", "said"),
    [(30, True, "valid for 30 days"), (3, None, "valid for 3 days"), (-2, False, "expired 2 days ago")],
)
def test_a_token_that_ends_soon_is_worth_knowing_and_one_that_has_ended_is_a_failure(
    days: int, ok: bool | None, said: str
) -> None:
    expires = int((NOW + datetime.timedelta(days=days)).timestamp())
    found = token(bearer(role="client", prj="projects/a", exp=expires), NOW)

    assert (found.ok, bool(found.advice)) == (ok, ok is not True)
    assert found.text == f"role client, projects/a, {said}"


@pytest.mark.parametrize("given", ["", "no token", "a.b.c", "a.e30.c", bearer(exp="soon")])
def test_what_is_no_token_is_a_failure(given: str) -> None:
    assert token(given, NOW).ok is False
    assert token(None, NOW).ok is None


def test_a_clock_that_differs_from_the_stores_is_a_failure_and_named() -> None:
    assert clocks({"store": 0.4, "proxy": 0.1, "algorithm": -1.0}).ok is True
    found = clocks({"store": 0.0, "proxy": 61.0, "algorithm": 0.2})
    assert (found.ok, found.text) == (False, "proxy is 61.0 s ahead of the store")
    found = clocks({"store": 40.0, "proxy": 40.0})
    assert (found.ok, found.text) == (False, "this machine is 40.0 s behind the store")
    assert clocks({"proxy": 0.0}).ok is None


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that is in use, and the only default port; its service is the store."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(checks, "DEFAULT_PORTS", {"store": port})
        yield port


def test_engines_that_take_no_calls_are_worth_knowing_and_runs_without_engines_are_not() -> None:
    whole = TrainingRun(name="projects/p/trainingRuns/a", engine_count=2, ready_engine_count=2)
    short = TrainingRun(name="projects/p/trainingRuns/b", engine_count=3, ready_engine_count=1)
    assert engines([TrainingRun(name="projects/p/trainingRuns/c")]) == []
    assert [(each.ok, each.text) for each in engines([whole])] == [(True, "all 2 accept calls")]
    [found] = engines([whole, short])
    assert found.ok is None
    assert found.text == "ready: 1 of 3 of projects/p/trainingRuns/b"


def test_a_vendor_whose_litellm_is_missing_is_a_failure_with_the_way_to_get_it() -> None:
    well = BackendHealth(name="backends/gpt", healthy=True)
    ill = BackendHealth(name="backends/gemini", last_failure_kind="litellm_not_installed")
    assert backends([well], "backends").ok
    found = backends([well, ill], "backends")
    assert found.ok is False
    assert "backends/gemini" in found.text
    assert "tools/litellm_env.sh" in found.advice


def test_a_default_port_belongs_to_the_stack_that_runs_here_only_if_that_stack_chose_it(
    tmp_path: Path, taken_port: int
) -> None:
    folder = StackFolder(tmp_path)
    folder.create()
    folder.keep_ports({"store": taken_port})
    others = f"in use by another program: store {taken_port}"

    stopped = checks.ports(folder)
    assert (stopped.ok, stopped.text) == (None, others)
    assert "`fulmen up` chooses other ports" in stopped.advice
    with folder.hold():
        found = checks.ports(folder)
        assert (found.ok, found.text) == (True, f"in use by this stack: store {taken_port}")
        folder.keep_ports({"store": 26719})
        found = checks.ports(folder)
        assert (found.ok, found.text, found.advice) == (None, others, "")
