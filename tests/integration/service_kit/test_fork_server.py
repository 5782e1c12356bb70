"""The fork server: what a forked process has, sees and does not see, and with what it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from fulmen_service_kit import GRPC_FORKS, forks
from fulmen_service_kit.fork_server import CONNECTION_VARIABLE
from fulmen_service_kit.forks import KILLED, ForkedProcess, ForkServer, ForkServerLost
from tests.support.algorithm.runs import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has fork servers")

LIMIT_S = 60
PROGRAM = "tests.support.service_kit.forked_program"
SECRET = "-".join(("a", "secret", "of", "the", "forked", "process"))
# Asks a server of its own for a process, says its id, and waits.
REQUESTER = f"""
import asyncio
from pathlib import Path
from fulmen_service_kit.forks import ForkServer

async def main():
    server = ForkServer(["json"])
    process = await server.fork("{PROGRAM}", [], environment={{}}, output=2, errors=2, folder=Path.cwd())
    print(process.pid, server.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""


@pytest_asyncio.fixture
async def server(repository_root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForkServer]:
    """Yields a server that has loaded a module that nothing else loads."""
    monkeypatch.setenv("PYTHONPATH", str(repository_root))
    monkeypatch.setenv("FULMEN_STORE_SIGNING_KEY", SECRET)
    monkeypatch.setenv("VENDOR_API_KEY", SECRET)
    found = ForkServer(["json.tool"])
    yield found
    found.close()


async def forked(
    server: ForkServer, folder: Path, *arguments: str, may_fork: bool = False, **environment: str
) -> tuple[ForkedProcess, dict[str, Any]]:
    """Starts the program in a fork; returns the process and what it says of itself."""
    output, writing = os.pipe()
    async with asyncio.timeout(LIMIT_S):
        try:
            process = await server.fork(
                PROGRAM,
                arguments,
                environment=environment,
                output=writing,
                errors=2,
                folder=folder,
                may_fork=may_fork,
            )
        finally:
            os.close(writing)
        with os.fdopen(output, "rb") as reading:
            return process, json.loads(await asyncio.to_thread(reading.readline))


async def ended(process: ForkedProcess) -> int:
    """Waits for the end of a process."""
    async with asyncio.timeout(LIMIT_S):
        return await process.wait()


def memory_of(pid: int) -> Iterator[bytes]:
    """Yields the memory of a process that it may write to."""
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb") as memory:
        for line in maps:
            places, rights, *_ = line.split()
            if rights.startswith("rw"):
                start, end = (int(place, 16) for place in places.split("-"))
                memory.seek(start)
                yield memory.read(end - start)


async def test_a_forked_process_has_its_own_arguments_environment_and_folder_and_nothing_of_the_server(
    server: ForkServer, tmp_path: Path
) -> None:
    first, _ = await forked(server, tmp_path)
    process, said = await forked(server, tmp_path, "a", "b c", NAME="value")

    assert said["arguments"] == ["a", "b c"]
    assert said["environment"] == {"NAME": "value", GRPC_FORKS: "0"}
    assert said["folder"] == str(tmp_path)
    assert said["loaded"]
    assert said["leads"]
    assert not said["connected"]
    # Standard input, output and error, and the folder that it lists.
    assert said["descriptors"] == [0, 1, 2, 3]
    words = psutil.Process(process.pid).cmdline()
    assert words[1:4] == ["-m", PROGRAM, "a"]
    await asyncio.gather(first.end(grace_s=0), process.end(grace_s=0))


async def test_the_exit_status_and_signals_reach_the_process_and_its_requester(
    server: ForkServer, tmp_path: Path
) -> None:
    killed, _ = await forked(server, tmp_path)
    assert killed.exit_status is None

    assert await killed.end(grace_s=LIMIT_S) == -signal.SIGTERM
    assert killed.exit_status == -signal.SIGTERM


async def test_the_server_never_holds_what_a_process_is_given(server: ForkServer, tmp_path: Path) -> None:
    process, said = await forked(server, tmp_path, SECRET, TOKEN=SECRET)
    assert said["environment"]["TOKEN"] == SECRET
    assert server.pid is not None

    def holds(pid: int) -> bool:
        return any(SECRET.encode() in region for region in memory_of(pid))

    # The process itself shows that the search finds what is there.
    assert holds(process.pid)
    assert not holds(server.pid)
    assert SECRET.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
    await process.end(grace_s=0)


async def test_a_killed_server_ends_its_processes_and_is_missed(server: ForkServer, tmp_path: Path) -> None:
    process, _ = await forked(server, tmp_path)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)

    assert await ended(process) == KILLED
    psutil.wait_procs([psutil.Process(process.pid)] if psutil.pid_exists(process.pid) else [], timeout=LIMIT_S)
    assert not psutil.pid_exists(process.pid)
    with pytest.raises(ForkServerLost):
        await forked(server, tmp_path)


async def test_a_server_that_hangs_holds_nobody_up_and_its_processes_can_be_killed(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = await forked(server, tmp_path)
    assert server.ready
    assert server.pid is not None
    monkeypatch.setattr(forks, "READY_LIMIT_S", 0.1)
    monkeypatch.setattr(forks, "KILL_LIMIT_S", 0.1)
    os.kill(server.pid, signal.SIGSTOP)

    with pytest.raises(ForkServerLost):
        await forked(server, tmp_path)
    assert await process.end(grace_s=0) == KILLED

    async def dead() -> bool:
        return bool(psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)

    await eventually(dead, what="the process is dead")
    os.kill(server.pid, signal.SIGCONT)


async def test_a_process_ends_with_its_requester(repository_root: Path) -> None:
    requester = await asyncio.create_subprocess_exec(
        sys.executable, "-c", REQUESTER, stdout=asyncio.subprocess.PIPE, cwd=repository_root
    )
    assert requester.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        process, server = map(int, (await requester.stdout.readline()).split())
    both = [psutil.Process(process), psutil.Process(server)]
    requester.kill()
    await requester.wait()

    _, left = await asyncio.to_thread(psutil.wait_procs, both, timeout=LIMIT_S)
    assert not left


async def test_a_process_may_be_given_a_connection_and_others_may_not(server: ForkServer, tmp_path: Path) -> None:
    plain, said = await forked(server, tmp_path)
    assert not said["connected"]
    asking, said = await forked(server, tmp_path, may_fork=True)
    assert said["connected"]
    assert CONNECTION_VARIABLE in said["environment"]

    await asyncio.gather(plain.end(grace_s=0), asking.end(grace_s=0))


async def test_the_first_request_over_a_connection_starts_the_server(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = server.connection()
    assert server.pid is None
    monkeypatch.setenv(CONNECTION_VARIABLE, str(connection.detach()))
    given = ForkServer.inherited()
    assert given is not None

    process, said = await forked(given, tmp_path)

    assert server.pid == said["parent"]
    assert server.ready
    given.close()
    # It outlives the connection that asked for it, whose processes do not.
    assert await process.end(grace_s=0) == KILLED
    another, _ = await forked(server, tmp_path)
    await another.end(grace_s=0)


async def test_modules_that_start_a_thread_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "log"
    server = ForkServer(["threaded"], log_file=log)

    with pytest.raises(ForkServerLost):
        await forked(server, tmp_path)

    assert "2 threads after its imports" in log.read_text()
    server.close()
