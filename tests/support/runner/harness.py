"""A runner process under test, and agents for it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import tarfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration

from fulmen.runner.v1.agent_spec_pb2 import (
    ISOLATION_UNSPECIFIED,
    AgentSpec,
    CommandEntry,
    Grader,
    Isolation,
    JudgeEntry,
    PythonEntry,
)
from fulmen.store.v1.rollout_pb2 import Rollout, RolloutPolicy
from fulmen_service_kit.security.tokens import Role, TokenSigner

SIGNING_KEY = "a signing key that only the tests know, 32+"
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0


def token(role: Role = Role.RUNNER) -> str:
    """Returns a token of the tests' deployment."""
    return TokenSigner(SIGNING_KEY).issue(role, subject="tests", ttl_s=3600)


class RunnerProcess:
    """`python -m fulmen_runner serve` as a child; its log is read line by line."""

    def __init__(
        self,
        settings: Mapping[str, object],
        environment: Mapping[str, str] | None = None,
        *,
        python: str = sys.executable,
    ) -> None:
        self._python = python
        base = {"TOKEN": token(), "PORT": "0", "METRICS_PORT": "0", "ISOLATION": "trusted"}
        merged = {**base, **{key.upper(): str(value) for key, value in settings.items()}}
        self._environment = {
            **os.environ,
            **{f"FULMEN_RUNNER_{key}": value for key, value in merged.items()},
            **(environment or {}),
        }
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.log: list[dict[str, Any]] = []
        self.tail: deque[str] = deque(maxlen=200)
        self._news = asyncio.Condition()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> RunnerProcess:
        """Starts it and waits until its session is open."""
        self._process = await asyncio.create_subprocess_exec(
            self._python,
            "-m",
            "fulmen_runner",
            "serve",
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 20,
        )
        self._reading = asyncio.create_task(self._read())
        await self.logged("session_opened", START_TIMEOUT_S)
        return self

    async def logged(self, event: str, deadline_s: float = END_TIMEOUT_S, count: int = 1) -> dict[str, Any]:
        """Waits until an event was logged `count` times; returns the last."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.log if line.get("event") == event]

        def ended() -> bool:
            return self._reading is not None and self._reading.done()

        async with asyncio.timeout(deadline_s), self._news:
            await self._news.wait_for(lambda: len(found()) >= count or ended())
        assert len(found()) >= count, "\n".join(self.tail)
        return found()[-1]

    async def ports(self) -> dict[str, Any]:
        """Returns the line that names the ports."""
        return await self.logged("serving")

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    async def exit_code(self) -> int:
        """Waits for its end."""
        assert self._process is not None
        async with asyncio.timeout(END_TIMEOUT_S):
            if self._reading is not None:
                await self._reading
            return await self._process.wait()

    async def close(self) -> None:
        """Kills it if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self.exit_code()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(line)
            if line.startswith("{"):
                self.log.append(json.loads(line))
            async with self._news:
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()


def bundle_of(files: Mapping[str, str], *, mode: int = 0o644) -> bytes:
    """Packs files as an agent's bundle."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            data = content.encode()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def spec_of(
    *,
    bundle: str = "",
    python: str = "",
    command: tuple[str, ...] = (),
    python_grader: str = "",
    command_grader: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    max_output_bytes: int = 0,
    isolation: Isolation = ISOLATION_UNSPECIFIED,
    judge: JudgeEntry | None = None,
    requirements: str = "",
    venv: Path | str = "",
) -> bytes:
    """Serialises an agent specification; `isolation` is that of Python agents and graders."""
    spec = AgentSpec(bundle=bundle, environment=environment or {})
    if requirements:
        spec.virtual_environment.requirements = requirements
    if venv:
        spec.virtual_environment.folder = str(venv)
    if python:
        spec.python.CopyFrom(PythonEntry(target=python, isolation=isolation))
    else:
        spec.command.CopyFrom(CommandEntry(argv=command, max_output_bytes=max_output_bytes))
    if python_grader:
        spec.grader.CopyFrom(Grader(python=PythonEntry(target=python_grader, isolation=isolation)))
    if command_grader:
        spec.grader.CopyFrom(Grader(command=CommandEntry(argv=command_grader)))
    if judge is not None:
        spec.grader.CopyFrom(Grader(judge=judge))
    return spec.SerializeToString()


def rollouts_of(agent: str, tasks: list[object], *, timeout_s: float = 60, max_attempts: int = 3) -> list[Rollout]:
    """Makes rollouts of an agent, one for each task."""
    policy = RolloutPolicy(
        max_attempts=max_attempts,
        attempt_timeout=Duration(seconds=int(timeout_s), nanos=int(timeout_s % 1 * 1e9)),
        retry_backoff=Duration(),
    )
    return [
        Rollout(agent=agent, input=json.dumps(task).encode(), input_content_type="application/json", policy=policy)
        for task in tasks
    ]


async def wait_for_exit(pid: int, deadline_s: float = END_TIMEOUT_S) -> None:
    """Waits until a process that is no child of this one has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(handle, ended.set)
        async with asyncio.timeout(deadline_s):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
