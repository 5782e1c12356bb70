"""The real store as a process, and how attempts end in it; `StoreDouble` has the same methods."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import (
    attempt_pb2,
    failure_pb2,
    lease_pb2,
    resource_pb2,
    resource_service_pb2_grpc,
    rollout_pb2,
    rollout_service_pb2_grpc,
)
from fulmen.store.v1 import (
    resource_service_pb2 as resources,
)
from fulmen.store.v1 import (
    rollout_service_pb2 as rollouts,
)
from fulmen_service_kit.security.tokens import Role
from tests.support.ports import free_ports
from tests.support.runner.harness import SIGNING_KEY, token

LEASE_TTL_S = 6.0
FINAL_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An attempt that ended: kind is empty if it succeeded."""

    attempt: str
    kind: str
    message: str
    rewards: dict[tuple[str, int | None], float] = field(default_factory=dict)
    output: bytes = b""


class RealStore:
    """`python -m fulmen_store serve` over a real PostgreSQL."""

    def __init__(self, database_url: str, *, lease_ttl_s: float = LEASE_TTL_S) -> None:
        self._database_url = database_url
        self._lease_ttl_s = lease_ttl_s
        self._port = free_ports()[0]
        self._process: asyncio.subprocess.Process | None = None
        self._channel: FulmenChannel | None = None
        self.target = f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> RealStore:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts it and waits until it serves."""
        settings = {
            "SIGNING_KEY": SIGNING_KEY,
            "DATABASE_URL": self._database_url,
            "PORT": str(self._port),
            "METRICS_PORT": "0",
            "HTTP_PORT": "0",
            "LEASE_TTL_S": str(self._lease_ttl_s),
        }
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fulmen_store",
            "serve",
            env={**os.environ, **{f"FULMEN_STORE_{key}": value for key, value in settings.items()}},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        lines = []
        async with asyncio.timeout(START_TIMEOUT_S):
            async for line in self._process.stdout:
                lines.append(line.decode())
                if '"event": "serving"' in lines[-1]:
                    break
            else:
                raise AssertionError("".join(lines))
        self._draining = asyncio.create_task(_discard(self._process.stdout))
        self._channel = open_channel(self.target, token=token(Role.CLIENT))

    async def close(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stops it."""
        if self._channel is not None:
            await self._channel.close()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._draining
                await self._process.wait()

    async def publish(self, resource_id: str, content: bytes) -> str:
        stub = resource_service_pb2_grpc.ResourceServiceStub(self._channel)
        version = resource_pb2.ResourceVersion(
            name=f"resources/{resource_id}", kind=resource_id.split(".")[0], content=content
        )
        answer = await stub.PublishResources(resources.PublishResourcesRequest(resources=[version]))
        return answer.resources[0].name

    async def create(self, batch: Iterable[rollout_pb2.Rollout]) -> list[str]:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(self._channel)
        answer = await stub.BatchCreateRollouts(rollouts.BatchCreateRolloutsRequest(rollouts=batch))
        return [rollout.name for rollout in answer.rollouts]

    async def ended(self, names: list[str]) -> dict[str, list[Ended]]:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(self._channel)
        missing, found = set(names), {}
        async with asyncio.timeout(FINAL_TIMEOUT_S):
            stream = stub.WatchRollouts(rollouts.WatchRolloutsRequest())
            async for message in stream:
                for rollout in (r for group in message.groups for r in group.rollouts):
                    missing.discard(rollout.name)
                    found[rollout.name] = [ended_of(each.name, each.failure_kind, each) for each in rollout.attempts]
                if not missing:
                    break
            stream.cancel()
        return {name: found[name] for name in names}

    async def cancel(self, names: list[str]) -> None:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(self._channel)
        await stub.CancelRollouts(rollouts.CancelRolloutsRequest(names=names))

    async def kill(self) -> None:
        await self.close(signal.SIGKILL)

    async def revive(self) -> None:
        await self.start()


def ended_of(name: str, kind: int, result: attempt_pb2.Attempt | lease_pb2.AttemptResult | None) -> Ended:
    """Returns how an attempt ended; without a result, it did not report."""
    return Ended(
        attempt=name,
        kind=failure_pb2.FailureKind.Name(kind).removeprefix("FAILURE_KIND_") if kind else "",
        message=result.failure_message if result else "",
        rewards={
            (r.dimension, r.step if r.HasField("step") else None): r.value for r in (result.rewards if result else ())
        },
        output=result.output if result else b"",
    )


async def _discard(stream: asyncio.StreamReader) -> None:
    async for _ in stream:
        continue
