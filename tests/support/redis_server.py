"""A real Redis, or Valkey, from the system's packages, with a password and, if asked for, TLS."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports

PASSWORD = "a-password-that-no-log-may-have"
_NAMES = ("redis-server", "valkey-server")
_START_S = 10


def require_redis() -> str:
    """Returns the path of the server; skips the test without it, or without the client's package."""
    pytest.importorskip("redis", reason="the package redis is missing: `make setup` installs it")
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no redis-server: `apt-get install redis-server` brings one")
    return found


class RedisServer:
    """The server; `async with RedisServer() as redis` runs one."""

    def __init__(self, *, certificate: Path | None = None, key: Path | None = None, ca: Path | None = None) -> None:
        """Sets the files of TLS; without a certificate it is not encrypted."""
        self._program = require_redis()
        self.port = free_ports()[0]
        self._folder = tempfile.mkdtemp(prefix="fulmen-test-redis-")
        self._ca = ca
        where = ["--port", str(self.port)]
        if certificate is not None:
            where = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            where += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca)]
        self._arguments = [
            *where,
            "--bind",
            "127.0.0.1",
            "--requirepass",
            PASSWORD,
            "--save",
            "",
            "--dir",
            self._folder,
        ]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Its URL, with the password."""
        tls = "" if self._ca is None else f"?ssl_ca_certs={self._ca}"
        return f"redis{'s' if tls else ''}://:{PASSWORD}@127.0.0.1:{self.port}/0{tls}"

    async def __aenter__(self) -> RedisServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def start(self) -> None:
        """Starts it, empty, on the same port."""
        self._process = await asyncio.create_subprocess_exec(
            self._program, *self._arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(_START_S):
            while not await self._answers():  # noqa: ASYNC110  # a probe of it
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Kills it."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            await process.wait()

    def freeze(self) -> None:
        """Lets it accept connections and answer none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        """Returns a client of its own."""
        from redis.asyncio import Redis

        return Redis.from_url(self.url)

    async def _answers(self) -> bool:
        from redis.exceptions import RedisError

        async with self.client() as client:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False
