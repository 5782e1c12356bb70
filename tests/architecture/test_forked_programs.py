"""Programs under test that are forked (`tests/support/forked.py`) are children as others are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fulmen_service_kit import launch
from tests.support import forked

STORE = [sys.executable, "-m", "fulmen_store"]
FEW = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits until the store is forked."""
    if sys.platform != "linux":
        pytest.skip("programs are forked on Linux only")
    # Libraries that other tests have loaded may have set some of these.
    for name in {*os.environ, *forked.ENVIRONMENT}:
        if name.startswith(forked.OF_THE_INTERPRETER):
            monkeypatch.delenv(name, raising=False)
    for name, value in forked.ENVIRONMENT.items():
        if name.startswith(forked.OF_THE_INTERPRETER):
            monkeypatch.setenv(name, value)
    deadline = time.monotonic() + LIMIT_S
    while not started("--help").is_forked:
        assert time.monotonic() < deadline
        time.sleep(1)


def started(*arguments: str, **options: Any) -> Any:
    """Runs the store to its end."""
    process = subprocess.Popen(
        [*STORE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    process.text = process.communicate(timeout=LIMIT_S)  # type: ignore[attr-defined]
    return process


@pytest.mark.parametrize(
    ("options", "is_forked"),
    [
        pytest.param(dict, True, marks=pytest.mark.long),
        (lambda: {"env": {**FEW, "FULMEN_STORE_PORT": "none"}}, True),
        (lambda: {"env": {**os.environ, "FULMEN_STORE_LOG_LEVEL": "loud"}, "start_new_session": True}, True),
        (lambda: {"env": {**os.environ, "PYTHONPATH": "/elsewhere"}}, False),
    ],
    ids=["as this process", "few variables", "a session of its own", "other modules"],
)
def test_it_ends_and_writes_as_it_does_when_it_is_started_as_usual(
    options: Callable[[], dict[str, Any]], is_forked: bool
) -> None:
    one = started("serve", **options())
    usual = subprocess.run(["env", *STORE, "serve"], capture_output=True, text=True, timeout=LIMIT_S, **options())
    assert one.is_forked == is_forked
    assert (one.returncode, *one.text) == (usual.returncode, usual.stdout, usual.stderr)
    assert one.returncode == 2
    assert "FULMEN_STORE_DATABASE_URL" in one.text[1]


def test_it_is_a_child_with_what_it_was_given_and_nothing_else(tmp_path: Path) -> None:
    given, other = os.pipe()
    variables = {name: value for name, value in os.environ.items() if name.startswith(forked.OF_THE_INTERPRETER)}
    # It waits for a database that accepts connections and says nothing.
    database = socket.create_server(("127.0.0.1", 0))
    database.settimeout(LIMIT_S)
    address = f"127.0.0.1:{database.getsockname()[1]}"
    settings = {
        "FULMEN_STORE_DATABASE_URL": f"postgresql://nobody@{address}/nothing", "FULMEN_STORE_PORT": "0",
        "FULMEN_STORE_HTTP_PORT": "0", "FULMEN_STORE_METRICS_PORT": "0", "FULMEN_STORE_SIGNING_KEY": "k" * 40,
    }  # fmt: skip
    process = subprocess.Popen(
        [*STORE, "serve"], cwd=tmp_path, pass_fds=(given,), start_new_session=True, env={**variables, **settings},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.is_forked  # type: ignore[attr-defined]
        database.accept()[0].close()  # it runs
        home = Path(f"/proc/{process.pid}")
        assert (os.getsid(process.pid), (home / "cwd").readlink()) == (process.pid, tmp_path)
        pipe = Path(f"/proc/self/fd/{given}").readlink()
        assert [int(entry.name) for entry in (home / "fd").iterdir() if entry.readlink() == pipe] == [given]
        assert (home / "cmdline").read_bytes().split(b"\0")[1:4] == [b"-m", b"fulmen_store", b"serve"]
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
        database.close()
        os.close(given)
        os.close(other)
    assert process.returncode == -9


def tied(*words: str) -> list[str]:
    """Returns the command line of a service that ends with its parent, as local stacks start them."""
    return [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *words]


def test_a_service_of_a_stack_writes_and_ends_as_it_does_when_it_is_started_as_usual(tmp_path: Path) -> None:
    (tmp_path / "fulmen_store.py").write_text("raise SystemExit('the module of the working directory')")
    command = [sys.executable, "-P", *STORE[1:], "serve"]
    options: dict[str, Any] = {
        "cwd": tmp_path, "umask": 0o077, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}, "text": True,
        "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
    }  # fmt: skip
    one, usual = (subprocess.Popen(words, **options) for words in (tied(*command), ["env", *command]))
    told = [each.communicate(timeout=LIMIT_S) for each in (one, usual)]
    assert (one.is_forked, usual.is_forked) == (True, False)  # type: ignore[attr-defined]
    assert (told[0], one.returncode) == (told[1], usual.returncode)
    assert one.returncode == 2
    assert "FULMEN_STORE_DATABASE_URL" in told[0][1]


def test_what_services_set_when_they_are_imported_keeps_no_program_from_being_forked() -> None:
    code = (
        "import os\n"
        "from tests.support import forked\n"
        "forked.install()\n"
        "import fulmen_service_kit.rpc.server, fulmen_algorithm.app, fulmen_store.app\n"
        "names = [name for name in os.environ if name.startswith(forked.OF_THE_INTERPRETER)]\n"
        "print([name for name in names if os.environ[name] != forked.ENVIRONMENT.get(name)])\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_none_is_forked_where_a_test_wants_programs_as_they_are_deployed() -> None:
    with forked.started_as_usual():
        assert not hasattr(started("--help"), "is_forked")
    assert started("--help").is_forked
