"""Fulmen's store: rollouts over gRPC, pushed over lease streams; a runner reports results and gets an acknowledgement of each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator

from benchmarks.store.peers.child import Done, Enqueue
from benchmarks.store.peers.load import INPUT, Settings
from benchmarks.store.rollouts import runner
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2, rollout_service_pb2_grpc

PAYLOAD = json.dumps(INPUT).encode()


@contextlib.asynccontextmanager
async def running(address: str, settings: Settings, done: Done) -> AsyncIterator[Enqueue]:
    """Runs runners; a job is one rollout. With `streams` a producer takes one of so many streams, otherwise it makes a call."""
    async with open_channel(address, token=settings["token"]) as channel:
        stub, stop = rollout_service_pb2_grpc.RolloutServiceStub(channel), asyncio.Event()
        runners = [asyncio.create_task(runner(channel, done, stop, spans=False)) for _ in range(settings["runners"])]
        streams = [(stub.StreamCreateRollouts(), asyncio.Lock()) for _ in range(settings["streams"])]
        following = itertools.cycle(streams)

        async def enqueue(count: int) -> None:
            rollouts = [rollout_pb2.Rollout(input=PAYLOAD) for _ in range(count)]
            if not streams:
                await stub.BatchCreateRollouts(rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts))
                return
            stream, lock = next(following)
            async with lock:
                await stream.write(rollout_service_pb2.StreamCreateRolloutsRequest(rollouts=rollouts))
                await stream.read()

        yield enqueue
        stop.set()
        for task in runners:
            task.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
