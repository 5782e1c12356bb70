"""Changes of rollouts for watchers: the last state of each, at least once, from a cursor on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from fulmen.errors import CursorInvalid, Draining
from fulmen.store.v1 import attempt_pb2, failure_pb2, lease_pb2, lease_service_pb2, rollout_pb2, rollout_selection_pb2
from fulmen.store.v1 import rollout_changes_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2 as queue_pb
from fulmen_store.rollouts.feed_cursor import Cursor
from fulmen_store.rollouts.watch import ChangeSelection
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, create, get

QUEUED, RUNNING, WAITS, DONE, CANCELLED = (
    rollout_pb2.ROLLOUT_STATE_QUEUED,
    rollout_pb2.ROLLOUT_STATE_RUNNING,
    rollout_pb2.ROLLOUT_STATE_RETRY_WAIT,
    rollout_pb2.ROLLOUT_STATE_SUCCEEDED,
    rollout_pb2.ROLLOUT_STATE_CANCELLED,
)
APPLIED, DUPLICATE = lease_pb2.COMPLETION_STATUS_APPLIED, lease_pb2.COMPLETION_STATUS_DUPLICATE
MINE, OTHER = (f"projects/default/trainingRuns/{name}" for name in ("mine", "other"))


class Watcher:
    """A watcher that keeps the last state of each rollout."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.cursor = ""
        self.rollouts: dict[str, rollout_pb2.Rollout] = {}
        self.sizes: list[int] = []

    async def read(self) -> pb.WatchRolloutChangesResponse:
        """Reads a message."""
        async with asyncio.timeout(LIMIT_S):
            message: pb.WatchRolloutChangesResponse = await self._stream.read()
        self.cursor = message.cursor
        self.sizes.append(message.ByteSize())
        self.rollouts |= {rollout.name: rollout for rollout in message.rollouts}
        return message

    async def until(self, name: str, state: int) -> rollout_pb2.Rollout:
        """Reads until a rollout is in a state."""
        while name not in self.rollouts or self.rollouts[name].state != state:
            await self.read()
        return self.rollouts[name]


@asynccontextmanager
async def watching(stubs: Stubs, **selection: Any) -> AsyncIterator[Watcher]:
    """Watches; the first message was read."""
    stream = stubs.rollouts.WatchRolloutChanges(pb.WatchRolloutChangesRequest(**selection))
    watcher = Watcher(stream)
    await watcher.read()
    try:
        yield watcher
    finally:
        stream.cancel()


async def test_a_watcher_sees_every_state_of_a_rollout(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    async with watching(stubs) as watcher:
        (name,) = await create(stubs, policy={"max_attempts": 2, "retry_on": ["FAILURE_KIND_AGENT_ERROR"]})
        queued = await watcher.until(name, QUEUED)
        assert not queued.attempts
        (first,) = await runner.take(1)
        running = await watcher.until(name, RUNNING)
        assert [each.state for each in running.attempts] == [attempt_pb2.ATTEMPT_STATE_RUNNING]
        await runner.complete([first], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR, failure_message="oh")
        waits = await watcher.until(name, WAITS)
        assert waits.ended_attempt_count == 1
        assert waits.attempts[0].failure_message == "oh"
        assert waits.retry_time.ToNanoseconds() > waits.attempts[0].end_time.ToNanoseconds()
        (second,) = await runner.take(1)
        await watcher.until(name, RUNNING)
        await runner.complete([second], output=b"x" * 100)
        done = await watcher.until(name, DONE)
    assert not done.HasField("retry_time")
    assert [each.final for each in done.attempts] == [False, True]
    assert not done.attempts[1].output
    assert done.HasField("end_time")


async def test_a_watcher_sees_a_priority_a_deadline_and_a_cancellation(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    async with watching(stubs) as watcher:
        change = rollout_pb2.Rollout(name=name, priority=7)
        await stubs.rollouts.UpdateRollout(rollout_selection_pb2.UpdateRolloutRequest(rollout=change))
        assert (await watcher.until(name, QUEUED)).priority == 7
        await stubs.rollouts.CancelRollouts(queue_pb.CancelRolloutsRequest(names=[name]))
        await watcher.until(name, CANCELLED)


async def test_what_changed_between_two_streams_is_found_by_the_cursor(stubs: Stubs) -> None:
    async with watching(stubs) as watcher:
        before = watcher.cursor
    names = await create(stubs, 3)
    runner = await Runner(stubs).open()
    taken = await runner.take(2)
    await runner.complete(taken[:1])
    states = dict.fromkeys(names, QUEUED) | {taken[1].rollout.name: RUNNING} | {taken[0].rollout.name: DONE}
    async with watching(stubs, cursor=before) as watcher:
        while watcher.rollouts.keys() != states.keys():
            await watcher.read()
        assert {name: rollout.state for name, rollout in watcher.rollouts.items()} == states
        after = watcher.cursor
    async with watching(stubs, cursor=after) as watcher:
        assert not watcher.rollouts


async def test_a_training_run_is_watched_before_it_has_rollouts(stubs: Stubs) -> None:
    async with watching(stubs, training_run=MINE) as watcher:
        await create(stubs, 2, training_run=OTHER)
        (name,) = await create(stubs, training_run=MINE)
        await watcher.until(name, QUEUED)
        assert list(watcher.rollouts) == [name]
        cursor = watcher.cursor
    foreign = Cursor(xid=2**40).encode(ChangeSelection(project_id=1))
    for selection in (
        {"cursor": cursor},
        {"cursor": "nonsense"},
        {"cursor": foreign},
        {"training_run": OTHER, "cursor": cursor},
    ):
        with pytest.raises(CursorInvalid):
            async with watching(stubs, **selection):
                pass


async def test_a_change_that_commits_late_is_not_missed(
    stubs: Stubs, connection: asyncpg.Connection, database_url: str
) -> None:
    (early, late) = await create(stubs, 2)
    slow = await asyncpg.connect(database_url)
    try:
        transaction = slow.transaction()
        await transaction.start()
        await slow.execute(
            "update item set sort_priority = -9, changed = pg_current_xact_id() where id = $1", late.rpartition("/")[2]
        )
        async with watching(stubs) as watcher:
            # A later transaction commits before: it has to wait for the slow one.
            await connection.execute(
                "update item set sort_priority = -8, changed = pg_current_xact_id() where id = $1",
                early.rpartition("/")[2],
            )
            await transaction.commit()
            while watcher.rollouts.keys() != {early, late}:
                await watcher.read()
            assert list(watcher.rollouts) == [late, early]
    finally:
        await slow.close()


async def test_many_large_changes_come_in_small_messages_without_inputs(stubs: Stubs) -> None:
    async with watching(stubs) as watcher:
        names = await create(stubs, 600, input=b'"' + b"x" * 2_000 + b'"', metadata={"note": "y" * 1_000})
        large = await create(stubs, 8, metadata={f"k{n}": "z" * 1_000 for n in range(32)}, input=b"1" * 200_000)
        while not {*names, *large} <= watcher.rollouts.keys():
            await watcher.read()
    assert max(watcher.sizes) <= 1024 * 1024 + 64 * 1024
    assert not any(rollout.input for rollout in watcher.rollouts.values())
    assert (await get(stubs, large[0])).input


async def test_a_watcher_of_changes_is_told_that_the_store_stops(store: StoreHandle, stubs: Stubs) -> None:
    async with watching(stubs) as watcher:
        await store.parts.drain()
        with pytest.raises(Draining):
            await watcher.read()


async def test_progress_is_shown_while_an_attempt_runs(stubs: Stubs) -> None:
    (name,) = await create(stubs, policy={"max_attempts": 2, "retry_on": ["FAILURE_KIND_AGENT_ERROR"]})
    runner = await Runner(stubs).open()
    other = await Runner(stubs).open()
    (taken,) = await runner.take(1)
    async with watching(stubs) as watcher:
        await say(other, taken.attempt, fraction=0.9, text="not mine")
        await say(runner, "nonsense", fraction=0.9)
        await say(runner, taken.attempt, fraction=1.5)
        await say(runner, taken.attempt, fraction=0.25, text="3 of 12\nfiles")
        while not (running := await watcher.until(name, RUNNING)).attempts[0].HasField("progress"):
            await watcher.read()
        assert (running.attempts[0].progress.fraction, running.attempts[0].progress.text) == (0.25, "3 of 12 files")
        assert running.attempts[0].progress.HasField("update_time")
        assert (await get(stubs, name)).attempts[0].progress == running.attempts[0].progress
        await runner.complete([taken], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR)
        await watcher.until(name, WAITS)
        await runner.take(1)
        again = await watcher.until(name, RUNNING)
    assert len(again.attempts) == 2
    assert not any(attempt.HasField("progress") for attempt in again.attempts)


async def say(runner: Runner, attempt: str, **progress: Any) -> None:
    """Reports the progress of an attempt."""
    reported = lease_service_pb2.ReportedProgress(attempt=attempt, progress=attempt_pb2.AttemptProgress(**progress))
    renewal = lease_service_pb2.RenewSession(progress=[reported])
    await runner.stream.write(lease_service_pb2.StreamLeasesRequest(renew=renewal))


async def test_what_an_agent_printed_is_returned_on_request_alone(stubs: Stubs) -> None:
    (name,) = await create(stubs, policy={"max_attempts": 3, "retry_on": ["FAILURE_KIND_AGENT_ERROR"]})
    runner = await Runner(stubs).open()
    failed = failure_pb2.FAILURE_KIND_AGENT_ERROR
    async with watching(stubs) as watcher:
        for printed in ({"stdout": "x" * 40_000 + "last"}, {}, {"stderr": "\u00e9" * 40_000}):
            (taken,) = await runner.take(1)
            assert await runner.complete([taken], failure_kind=failed, printed=printed) == [APPLIED]
            assert await runner.complete([taken], failure_kind=failed, printed=printed) == [DUPLICATE]
        shown = await watcher.until(name, rollout_pb2.ROLLOUT_STATE_FAILED)
    assert not any(attempt.HasField("printed") for attempt in [*shown.attempts, *(await get(stubs, name)).attempts])
    request = queue_pb.GetRolloutRequest(name=name, with_printed=True)
    first, second, third = (await stubs.rollouts.GetRollout(request)).rollout.attempts
    assert first.printed.stdout == "x" * (32 * 1024 - 4) + "last"
    assert not second.HasField("printed")
    assert third.printed.stderr == "\u00e9" * 16 * 1024
