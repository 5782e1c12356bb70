"""The clients of the state machine test: streams that are read all the time, so that nothing has to be waited for blindly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from fulmen.errors import SessionEnded
from fulmen.ids import parse_runner_name, runner_name
from fulmen.store.v1 import lease_pb2, lease_service_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from tests.support.store.rollout_model import Lease
from tests.support.store.running import LIMIT_S, Stubs

__all__ = ["StreamClient", "Watcher"]


class StreamClient:
    """A lease stream; counts the credit that it has granted."""

    def __init__(self, replica: int, news: asyncio.Event) -> None:
        self.replica = replica
        self.session = ""
        self.credit = 0
        self.lost: list[str] = []
        self.told: list[Lease] = []
        self.closed = False
        self._news = news
        self._stream: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._acks: asyncio.Queue[lease_pb2.CompletionAck] = asyncio.Queue()

    @classmethod
    def of_a_call(cls, replica: int, session: str) -> StreamClient:
        """Makes the stream that a call of AcquireLeases had for as long as it lasted."""
        stream = cls(replica, asyncio.Event())
        stream.session, stream.closed = session, True
        return stream

    async def open(self, stubs: Stubs, *, session: str = "", running: Sequence[str] = ()) -> None:
        """Opens the stream, or resumes a session."""
        self._stream = stubs.leases.StreamLeases()
        opening = lease_service_pb2.OpenSession(
            runner=runner_name(session) if session else "",
            info=lease_pb2.RunnerInfo(host="model", slot_count=1),
            running_attempts=running,
        )
        await self._stream.write(lease_service_pb2.StreamLeasesRequest(open=opening))
        opened = (await self._stream.read()).opened
        self.session, self.lost = str(parse_runner_name(opened.runner)), sorted(opened.lost_attempts)
        self._reader = asyncio.create_task(self._read(), name=f"stream-{self.session}")

    async def demand(self, count: int) -> None:
        """Grants credit."""
        self.credit += count
        await self._write(add_credits=lease_service_pb2.AddCredits(credit_count=count))

    async def report(self, results: Sequence[lease_pb2.AttemptResult]) -> list[int]:
        """Reports attempts; returns the statuses of the answer."""
        await self._write(complete=lease_service_pb2.CompletedAttempts(results=results))
        return [(await self._acks.get()).status for _ in results]

    async def release(self, attempts: Sequence[str]) -> list[int]:
        """Gives leases back; returns the statuses of the answer."""
        await self._write(release=lease_service_pb2.ReleasedAttempts(attempts=attempts))
        return [(await self._acks.get()).status for _ in attempts]

    async def live(self) -> None:
        """Gives a sign of life; comes back when the store has it."""
        await self._write(renew=lease_service_pb2.RenewSession())
        # Messages are read in order: an answer to a later one says that this one was read.
        await self.release(["projects/default/rollouts/01900000-0000-7000-8000-000000000000/attempts/1"])

    async def leave(self) -> None:
        """Closes the stream; comes back when the store has given up the stream."""
        if not self.closed:
            await self._stream.done_writing()
        await self.gone()

    def check(self) -> None:
        """Raises what ended the stream if it was not the end of the session."""
        if self._reader is not None and self._reader.done():
            self._reader.result()

    async def gone(self) -> None:
        """Waits until the stream has ended."""
        assert self._reader is not None
        await self._reader

    async def drop(self) -> None:
        """Ends everything at once."""
        if self._reader is None:
            return
        self._stream.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _write(self, **message: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self._stream.write(lease_service_pb2.StreamLeasesRequest(**message))

    async def _read(self) -> None:
        with contextlib.suppress(SessionEnded):
            async for message in self._stream:
                self.told += [Lease(one.rollout.name, one.lease_id, one.epoch) for one in message.assign.assignments]
                for ack in message.ack.acks:
                    self._acks.put_nowait(ack)
                self._news.set()
        self.closed = True
        self._news.set()


class Watcher:
    """A reader of the feed, from its last cursor on."""

    def __init__(self, project: str, news: asyncio.Event) -> None:
        self.groups: list[pb.FinishedGroup] = []
        self._project = project
        self._news = news
        self._task: asyncio.Task[None] | None = None

    @property
    def read(self) -> list[tuple[str, ...]]:
        """What was read: each group as the names of its members."""
        return [tuple(sorted(rollout.name for rollout in group.rollouts)) for group in self.groups]

    async def follow(self, stubs: Stubs) -> None:
        """Goes on at a replica."""
        await self.drop()
        cursor = self.groups[-1].cursor if self.groups else ""
        stream = stubs.rollouts.WatchRollouts(pb.WatchRolloutsRequest(project=self._project, cursor=cursor))
        self._task = asyncio.create_task(self._read(stream), name="watcher")

    async def drop(self) -> None:
        """Stops reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, stream: Any) -> None:
        try:
            async for message in stream:
                self.groups += message.groups
                self._news.set()
        finally:
            stream.cancel()
