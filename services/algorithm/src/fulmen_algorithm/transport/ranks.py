"""`fulmen.algorithm.v1.RankService`."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

import grpc.aio

from fulmen.algorithm.v1 import rank_service_pb2 as pb
from fulmen.algorithm.v1.rank_service_pb2_grpc import RankServiceServicer, RankServiceStub
from fulmen.errors import ArgumentInvalid, Violation
from fulmen_algorithm.cluster.joined import JoinedMachine
from fulmen_algorithm.cluster.joining import RunRanks
from fulmen_algorithm.cluster.port import Node, Resources
from fulmen_algorithm.trainers.calls import build, differences
from fulmen_algorithm.training.compute import MAX_RANKS
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.join_streams import JoinStreams, again, opening
from fulmen_algorithm.transport.run_access import require_own_run

MAX_BUILD: Final = 64
_NODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RankServicer(RankServiceServicer):
    """Decodes, calls once, encodes."""

    def __init__(self, ranks: RunRanks, forwarding: Forwarding) -> None:
        self._ranks = ranks
        self._forwarding = forwarding
        self._streams = JoinStreams()

    def drain(self) -> None:
        """Ends the open streams; the machines join again when the service is back."""
        self._streams.drain()

    async def JoinRanks(
        self, requests: AsyncIterator[pb.JoinRanksRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.JoinRanksResponse]:
        """Adds a machine to a run."""
        hello = (await opening(requests, pb.JoinRanksRequest())).hello
        if problems := _problems(hello):
            raise ArgumentInvalid("The machine cannot join.", violations=problems)
        run = hello.training_run
        require_own_run(run)
        self._streams.require_open()
        if owner := self._ranks.owner_of(run):
            said = again(pb.JoinRanksRequest(hello=hello), requests)
            async for forwarded in self._forwarding.stream(owner, RankServiceStub, "JoinRanks", said, context):
                yield forwarded
            return
        machine = JoinedMachine(_node(hello))
        mine = await asyncio.to_thread(build)
        others = [Violation(field="build", description=text) for text in differences(dict(hello.build), mine)]
        orders = self._streams.kept(
            machine,
            serving=self._ranks.use(run, machine, differences=others),
            reading=_read(requests, machine),
            silence_limit_s=self._ranks.silence_s,
        )
        async with aclosing(orders):
            async for order in orders:
                yield order


def _node(hello: pb.RanksHello) -> Node:
    has = Resources(cpus=hello.cpus, gpus=hello.gpus, memory_bytes=hello.memory_bytes)
    return Node(name=hello.node, has=has, most=hello.ranks)


def _problems(hello: pb.RanksHello) -> list[Violation]:
    found = []
    if not _NODE.fullmatch(hello.node):
        found.append(Violation(field="hello.node", description="has 1 to 64 characters of [A-Za-z0-9_.-]"))
    if not 1 <= hello.ranks <= MAX_RANKS:
        found.append(Violation(field="hello.ranks", description=f"is {hello.ranks}, allowed are 1 to {MAX_RANKS}"))
    counts = {"gpus": hello.gpus, "cpus": hello.cpus, "memory_bytes": hello.memory_bytes}
    found += [Violation(field=f"hello.{name}", description="is negative") for name, has in counts.items() if has < 0]
    if len(hello.build) > MAX_BUILD:
        found.append(Violation(field="hello.build", description=f"has more than {MAX_BUILD} entries"))
    return found


async def _read(requests: AsyncIterator[pb.JoinRanksRequest], machine: JoinedMachine) -> None:
    """Takes messages until the machine ends the stream."""
    async for message in requests:
        if message.HasField("hello"):
            text = "must be the first message, and only the first"
            raise ArgumentInvalid("The stream is malformed.", violations=[Violation(field="hello", description=text)])
        machine.hear(message)
