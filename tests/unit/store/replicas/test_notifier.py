"""Notification goes to every live peer, what happens meanwhile goes together, and a peer that does not hear is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen_store.leases.leases import LeasedAttempt
from fulmen_store.replicas.live_replicas import LiveReplicas, Replica
from fulmen_store.replicas.notifications import Notification
from fulmen_store.replicas.notifier import NotificationReceiver, NotificationSender
from fulmen_store.replicas.peer_client import PeerUnreachableError
from fulmen_store.replicas.wakeups import PROJECTS_CHANGED, Wakeups
from fulmen_store.scheduling.runner_streams import CancelRequested, Drained, RunnerStreams
from tests.support.store.project_names import known_projects
from tests.support.store.scheduling import runner_stream

LIMIT_S = 10.0
RUNNER = uuid7()


class HeldClient:
    """A peer client whose calls end when the test says so."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[tuple[str, Notification, asyncio.Future[None]]] = asyncio.Queue()
        self.kept: list[set[str]] = []

    async def notify(self, address: str, notification: Notification) -> None:
        """Waits for the test to end the call."""
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.put_nowait((address, replace(notification), end))
        await end

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Notes what is kept."""
        self.kept.append(set(addresses))

    async def next(self) -> tuple[str, Notification, asyncio.Future[None]]:
        """Returns the next call."""
        async with asyncio.timeout(LIMIT_S):
            return await self.calls.get()


def peers(*addresses: str) -> list[Replica]:
    return [Replica(replica_id=uuid7(), address=address) for address in addresses]


@asynccontextmanager
async def sending(
    *addresses: str, enabled: bool = True
) -> AsyncIterator[tuple[NotificationSender, HeldClient, LiveReplicas]]:
    """Runs a sender with peers at these addresses."""
    known, client = LiveReplicas(uuid7()), HeldClient()
    known.update(peers(*addresses))
    sender = NotificationSender(
        replicas=known, client=client, streams=RunnerStreams(), projects=known_projects(), enabled=enabled
    )
    task = asyncio.create_task(sender.run())
    try:
        yield sender, client, known
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_happens_during_a_call_goes_with_the_next_one() -> None:
    async with sending("a:1") as (sender, client, _):
        sender.work_unmatched([1])
        _, first, end = await client.next()
        assert first.ready == {1}
        sender.work_unmatched([2])
        sender.rollouts_finished([3])
        sender.announced([("resources", 4), ("other", 5), PROJECTS_CHANGED])
        sender.work_unmatched([2])
        end.set_result(None)
        _, second, end = await client.next()
        assert (second.ready, second.finished, second.resources, second.projects_changed) == ({2}, {3}, {4}, True)
        end.set_result(None)
        await asyncio.sleep(0)
        assert client.calls.empty()


async def test_a_slow_peer_keeps_no_other_waiting() -> None:
    async with sending("a:1", "b:1") as (sender, client, _):
        sender.work_unmatched([1])
        calls = {address: end for address, _, end in (await client.next(), await client.next())}
        assert calls.keys() == {"a:1", "b:1"}
        calls["b:1"].set_result(None)
        sender.work_unmatched([2])
        address, notification, _ = await client.next()
        assert (address, notification.ready) == ("b:1", {2})


async def test_a_peer_that_did_not_hear_is_left_alone_until_the_next_look() -> None:
    async with sending("a:1") as (sender, client, known):
        sender.work_unmatched([1])
        _, _, end = await client.next()
        sender.work_unmatched([2])
        end.set_exception(PeerUnreachableError("UNAVAILABLE"))
        for _ in range(5):
            await asyncio.sleep(0)
        sender.work_unmatched([3])
        for _ in range(5):
            await asyncio.sleep(0)
        assert client.calls.empty()
        known.update(known.others)
        sender.work_unmatched([4])
        _, notification, _ = await client.next()
        assert notification.ready == {4}


async def test_a_peer_that_left_is_told_nothing_and_its_connection_is_closed() -> None:
    async with sending("a:1", "b:1") as (sender, client, known):
        sender.work_unmatched([1])
        for _ in range(2):
            (await client.next())[2].set_result(None)
        known.update(known.others[:1])
        sender.work_unmatched([2])
        address, _, _ = await client.next()
        assert address == known.others[0].address
        assert client.kept == [{address}]


async def test_cancels_go_to_the_runner_here_or_to_the_peers() -> None:
    streams, known, client = RunnerStreams(), LiveReplicas(uuid7()), HeldClient()
    known.update(peers("a:1"))
    sender = NotificationSender(replicas=known, client=client, streams=streams, projects=known_projects())
    here = runner_stream(streams)
    task = asyncio.create_task(sender.run())
    there, rollout = uuid7(), uuid7()
    asked = CancelRequested(attempts=[LeasedAttempt(1, rollout, 3)])
    sender.send_each([(here.session_id, asked), (there, asked), (there, Drained())])
    assert here.outbox.take() == asked
    _, notification, _ = await client.next()
    attempt = AttemptName(project=DEFAULT_PROJECT, rollout_id=rollout, number=3)
    assert [(hint.session_id, hint.attempt) for hint in notification.cancels] == [(there, attempt)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_sender_that_is_switched_off_says_nothing() -> None:
    async with sending("a:1", enabled=False) as (sender, client, _):
        sender.work_unmatched([1])
        for _ in range(5):
            await asyncio.sleep(0)
        assert client.calls.empty()


async def test_heard_notification_wakes_those_who_wait_and_is_not_passed_on() -> None:
    announced: list[object] = []
    wakeups = Wakeups()
    wakeups.announced.subscribe(announced.extend)

    class NoLeases:
        async def held(self, rollout_ids: object) -> list[object]:
            raise AssertionError("nobody sits here, nothing is to be read")

    class Hints:
        def __init__(self) -> None:
            self.projects: list[frozenset[int]] = []

        def hint(self, projects: frozenset[int]) -> None:
            self.projects.append(projects)

    ready, finished, ordered = Hints(), Hints(), Hints()
    receiver = NotificationReceiver(
        dispatcher=ready, feed=finished, wakeups=wakeups, leases=NoLeases(), streams=RunnerStreams(), orders=ordered
    )
    counts = {key: wakeups.count(key) for key in (("resources", 2), PROJECTS_CHANGED)}
    notification = Notification(ready={7}, finished={1, 9}, resources={2, 9}, projects_changed=True, ordered={RUNNER})
    await receiver.receive(notification)
    assert all(wakeups.count(key) == count + 1 for key, count in counts.items())
    assert (ready.projects, finished.projects) == ([frozenset({7})], [{1, 9}])
    assert ordered.projects == [{RUNNER}]
    assert announced == []
    # Keys that nobody asked for leave nothing behind.
    assert wakeups.count(("resources", 9)) == 0
