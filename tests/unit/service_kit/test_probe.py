"""The health probe of containers, as their engine runs it."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fulmen_service_kit import probe
from tests.support.certificates import Authority

LIMIT_S = 60
Context = Callable[[Path], ssl.SSLContext | None]


def plain(folder: Path) -> None:
    """Returns no context: plain HTTP."""


def encrypted(folder: Path) -> ssl.SSLContext:
    """Returns the context of a server whose certificate no machine trusts."""
    pair = Authority(folder).issue("service")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    return context


@asynccontextmanager
async def a_server(answer: bytes, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Runs a server that answers every request with these bytes; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def probed(target: str) -> tuple[int, str]:
    """Runs the probe; returns its exit status and what it says."""
    command = [sys.executable, "-I", "-S", probe.__file__, target]
    ended = await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("context", [plain, encrypted])
async def test_a_service_is_healthy_that_answers_with_200(context: Context, tmp_path: Path) -> None:
    async with a_server(b"HTTP/1.1 200 OK\r\n\r\nok", context(tmp_path)) as port:
        assert await probed(f"127.0.0.1:{port}/readyz") == (0, "")


@pytest.mark.parametrize("context", [plain, encrypted])
async def test_the_answer_of_a_service_that_is_not_ready_is_shown(context: Context, tmp_path: Path) -> None:
    answer = b'HTTP/1.1 503 Service Unavailable\r\nX: y\r\n\r\n{"parts": {"routes": "not loaded"}}'
    async with a_server(answer, context(tmp_path)) as port:
        status, said = await probed(f"127.0.0.1:{port}/readyz")
    assert status == 1
    assert said == f'127.0.0.1:{port}/readyz answers 503 Service Unavailable: {{"parts": {{"routes": "not loaded"}}}}\n'


@pytest.mark.parametrize("answer", [b"", b"200", b"SSH-2.0-OpenSSH_9.2\r\n"])
async def test_what_is_not_http_is_not_healthy(answer: bytes) -> None:
    async with a_server(answer) as port:
        assert await probed(f"127.0.0.1:{port}/readyz") == (1, f"127.0.0.1:{port}/readyz does not speak HTTP\n")


@pytest.mark.parametrize("target", ["", "127.0.0.1:80", "127.0.0.1/readyz", "127.0.0.1:http/readyz"])
async def test_a_malformed_address_is_refused(target: str) -> None:
    assert await probed(target) == (2, "usage: python -I -S probe.py HOST:PORT/PATH\n")
