"""Health checks of services: by the file in which they announce their ports, and by gRPC."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

__all__ = ["ReadyFile", "is_serving", "wait_until_serving"]

PROBE_INTERVAL_S: Final = 0.05
PROBE_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFile:
    """The file that a service writes when it is ready."""

    pid: int
    port: int
    http_port: int | None
    metrics_port: int | None

    @classmethod
    def read(cls, path: Path) -> ReadyFile | None:
        """Reads the file; None while there is none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(
            pid=data["pid"],
            port=data["port"],
            http_port=data.get("http_port"),
            metrics_port=data.get("metrics_port"),
        )


async def is_serving(target: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Returns whether the gRPC server at `host:port` is serving."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING


async def wait_until_serving(ready_file: Path, pid: int, target: str, *, timeout_s: float) -> None:
    """Waits until the process has announced its ports and its gRPC server is serving.

    Raises:
        TimeoutError: if that takes longer than the timeout.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            ready = ReadyFile.read(ready_file)
            if ready is not None and ready.pid == pid and await is_serving(target):
                return
            await asyncio.sleep(PROBE_INTERVAL_S)
