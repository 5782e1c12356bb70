"""Runs the programs of clients/, one for each language, as their users do: as processes that print JSON lines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

__all__ = ["LANGUAGES", "Client", "Done", "Running", "built"]

ROOT = Path(__file__).parents[2]
LANGUAGES = ("node", "go", "java", "cpp")
LIMIT_S = 90.0
BUILD_LIMIT_S = 400
TOOLCHAIN_MISSING = 3

Line = dict[str, Any]


@cache
def built(language: str) -> Path:
    """Returns the program of a language, built if it was not yet; skips, or fails in CI, if it cannot be built here."""
    command = ["tools/build_clients.sh", language]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    if ended.returncode == TOOLCHAIN_MISSING and not os.environ.get("CI"):
        pytest.skip(f"the {language} client cannot be built here: tools/client_toolchains.sh installs what it needs")
    assert ended.returncode == 0, ended.stderr
    return ROOT / "clients" / language / "build" / "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a program ended."""

    status: int
    lines: list[Line]
    stderr: str

    @property
    def error(self) -> Line:
        """The error that it ended with."""
        error: Line = json.loads(self.stderr)["error"]
        return error


@dataclass(slots=True, kw_only=True)
class Running:
    """A program that runs."""

    process: asyncio.subprocess.Process
    lines: list[Line] = field(default_factory=list)

    async def next(self) -> Line:
        """Reads the next line."""
        line = await self._read()
        assert line is not None, f"it ended: {(await self.end()).stderr}, after {self.lines}"
        return line

    async def expect(self, event: str) -> Line:
        """Reads until a line tells of an event."""
        while (line := await self.next())["event"] != event:
            pass
        return line

    async def end(self) -> Done:
        """Reads to the end."""
        while await self._read() is not None:
            pass
        assert self.process.stderr is not None
        stderr = (await self.process.stderr.read()).decode()
        return Done(status=await self.process.wait(), lines=self.lines, stderr=stderr)

    async def _read(self) -> Line | None:
        assert self.process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            text = await self.process.stdout.readline()
        if not text:
            return None
        line: Line = json.loads(text)
        self.lines.append(line)
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The program of a language, with the settings of its environment."""

    program: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def with_environment(self, **variables: str) -> Client:
        """Returns a client with more settings."""
        return Client(program=self.program, environment={**self.environment, **variables})

    @asynccontextmanager
    async def start(self, *arguments: str | int | float | Path) -> AsyncIterator[Running]:
        """Starts the program, and kills it if it still runs at the end of the block."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self.program,
            *map(str, arguments),
            env={**os.environ, **self.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            limit=1024 * 1024,
        )
        try:
            yield Running(process=process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def run(self, *arguments: str | int | float | Path) -> Done:
        """Runs the program to its end."""
        async with self.start(*arguments) as running:
            return await running.end()

    async def lines(self, *arguments: str | int | float | Path) -> list[Line]:
        """Runs the program to its good end; returns what it printed."""
        done = await self.run(*arguments)
        assert (done.status, done.stderr) == (0, ""), done
        return done.lines
