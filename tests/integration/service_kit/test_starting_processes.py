"""A service starts processes while it serves; none of them dies before its program begins."""

from __future__ import annotations

import subprocess
import sys

# As a service does: the kit first, then grpc; a server and clients that are busy while processes start.
SERVICE = """
import asyncio, os
import fulmen_service_kit
import grpc.aio, uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

COUNT = 150

async def main():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call(number):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("fulmen.number", number)])
        while True:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    calls = [asyncio.create_task(call(number)) for number in range(4)]
    statuses = []
    for _ in range(COUNT):
        process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 7", start_new_session=True)
        statuses.append(await process.wait())
    print(statuses.count(7), flush=True)
    os._exit(0)

uvloop.run(main())
"""


def test_every_started_process_reaches_its_program() -> None:
    done = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=100, check=True)

    assert done.stdout.split() == ["150"], done.stderr
