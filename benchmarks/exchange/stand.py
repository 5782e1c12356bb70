"""The processes of a measurement: a rank and a server of shards at each end of a line, and orders to all of them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from benchmarks.exchange.lines import INSIDE, Line, Lines, Place
from fulmen_service_kit.security.tokens import Role, TokenSigner

ORDER_LIMIT_S = 600.0
END_LIMIT_S = 30.0
TOKEN_TTL_S = 86_400.0
LOG_CHARACTERS = 2000
Answers = list[dict[str, Any]]


class RankFailed(Exception):
    """A rank ended, or did not answer in time; the text is the end of what it said."""


class Stand:
    """Ranks on lines, and servers of shards beside them; to be used as a context manager."""

    def __init__(self, line: Line, world_size: int) -> None:
        self._lines = Lines(line, world_size)
        self._world_size = world_size
        self._stack = ExitStack()
        self._ranks: list[subprocess.Popen[str]] = []
        self._servers: list[subprocess.Popen[str]] = []
        self._logs: list[Path] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def shape(self) -> None:
        """Gives the lines their rate, which they do not have at first."""
        self._lines.shape()

    def order(self, what: str, **more: object) -> Answers:
        """Has all ranks do something; returns their answers.

        Raises:
            RankFailed: if one ends, or it takes too long.
        """
        limit = threading.Timer(ORDER_LIMIT_S, self._kill)
        limit.start()
        try:
            for rank in self._ranks:
                _pipe(rank.stdin).write(json.dumps({"do": what, **more}) + "\n")
                _pipe(rank.stdin).flush()
            return [json.loads(self._line(rank)) for rank in self._ranks]
        except OSError as error:
            raise RankFailed(f"{what}: {error}; {self._said()}") from error
        finally:
            limit.cancel()

    def servers_cpu_s(self) -> float:
        """Returns the CPU time of all servers until now."""
        times = [psutil.Process(server.pid).cpu_times() for server in self._servers]
        return sum(each.user + each.system for each in times)

    def _start(self) -> None:
        # In a private namespace /run is invisible to others and disappears with its last process.
        where = "/run" if os.environ.get(INSIDE) else None
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fulmen-exchange-", dir=where)))
        self._stack.enter_context(self._lines)
        self._stack.callback(self._kill)
        key = secrets.token_hex(32)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FULMEN_EXCHANGE_BENCHMARK_SIGNING_KEY": key}
        token = TokenSigner(key).issue(Role.SERVICE, subject="rank", ttl_s=TOKEN_TTL_S)
        for number in range(self._world_size):
            log = folder / f"server-{number}.log"
            self._servers.append(
                self._started(number, "server", self._lines.address(number), log=log, environment=environment)
            )
        ports = [self._line(server).strip() for server in self._servers]
        targets = [f"{self._lines.address(number)}:{port}" for number, port in enumerate(ports)]
        meeting = f"{self._lines.address(0)}:{_free_port()}"
        for number in range(self._world_size):
            place = Place(
                rank=number,
                world_size=self._world_size,
                meeting=meeting,
                interface=self._lines.interface,
                targets=targets,
                token=token,
            )
            log = folder / f"rank-{number}.log"
            words = ("rank", json.dumps(asdict(place)))
            self._ranks.append(self._started(number, *words, log=log, environment=environment))

    def _started(
        self, number: int, module: str, *arguments: str, log: Path, environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        words = [*self._lines.within(number), sys.executable, "-m", f"benchmarks.exchange.{module}", *arguments]
        self._logs.append(log)
        with log.open("wb") as sink:
            # In its own session, so that Ctrl-C reaches only the parent, which ends all of them.
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def _line(self, process: subprocess.Popen[str]) -> str:
        line = _pipe(process.stdout).readline()
        if not line:
            raise RankFailed(self._said())
        return line

    def _said(self) -> str:
        texts = [f"{log.name}: {log.read_text(encoding='utf-8')[-LOG_CHARACTERS:]}" for log in self._logs]
        return "\n".join(texts)

    def _kill(self) -> None:
        for process in (*self._ranks, *self._servers):
            process.kill()
        for process in (*self._ranks, *self._servers):
            process.wait(END_LIMIT_S)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _free_port() -> int:
    """Returns a port that is free on this side; in a namespace of a rank all are."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(text: str) -> None:
    """Prints a line at once: a benchmark of minutes must not look dead."""
    sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stdout.flush()
