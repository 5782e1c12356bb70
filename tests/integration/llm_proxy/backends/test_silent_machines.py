"""A backend whose machine is cut off in the middle of a call is noticed long before the call's own timeouts."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import aiohttp
import pytest

from fulmen_llm_proxy.backends.client import open_session
from tests.support.machines import AVAILABLE, Machines

PORT = 8123
NEVER_S = 600
SILENCE_LIMIT_S = 4
# It takes a request, says so, and answers when its input ends.
BACKEND = f"""
import socket, sys
server = socket.create_server(("0.0.0.0", {PORT}))
print("listens", flush=True)
connection, _ = server.accept()
connection.recv(10_000)
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not AVAILABLE, reason="needs Linux, root, ip and nsenter")
async def test_a_call_to_a_machine_that_gives_no_sign_ends_with_an_error() -> None:
    with Machines(1) as machines:
        words = [*machines.within(0), sys.executable, "-c", BACKEND]
        backend = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert backend.stdout is not None
        assert await asyncio.to_thread(backend.stdout.readline) == "listens\n"
        timeouts = {"connect_timeout_s": 20, "first_byte_timeout_s": NEVER_S, "silence_limit_s": SILENCE_LIMIT_S}
        async with open_session(**timeouts) as session:
            call = asyncio.create_task(session.post(f"http://{machines.address(0)}:{PORT}/", data=b"{}"))
            assert await asyncio.to_thread(backend.stdout.readline) == "asked\n"
            machines.silence(0, PORT)
            async with asyncio.timeout(NEVER_S / 10):
                with pytest.raises(aiohttp.ClientError):
                    await call
        backend.kill()
        backend.communicate()
