"""The whole queue against a model: whatever clients, runners, timers and replicas do, in any order, the store does what
`tests/support/store/rollout_model.py` says, and nothing else.

A seed is printed; FULMEN_TEST_SEED repeats a run, and makes what fails smaller, which takes minutes.
The long test takes FULMEN_TEST_SOAK times as many examples. What once failed is kept in `.hypothesis` and tried first.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import (
    invariant,
    rule,
    run_state_machine_as_test,
)

from fulmen.errors import RolloutStateInvalid, SessionEnded
from fulmen.ids import parse_rollout_name, runner_name
from fulmen.store.v1 import lease_pb2, lease_service_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.rollouts.transitions import FINAL_STATES, FailureKind, RolloutState
from tests.support.postgres import shared_server
from tests.support.soak import SEED_VARIABLE, SOAK, given_seed, long_after
from tests.support.soak import seed as soak_seed
from tests.support.store.model_world import World
from tests.support.store.queue_machine import QueueClients, kinds, pick, picks, replica_numbers, when
from tests.support.store.rollout_model import APPLIED, DUPLICATE, LEASE_LOST, Lease
from tests.support.store.running import StoreHandle, replicas
from tests.support.store.spans import append, chunk_of, stored

SEED = soak_seed()
FEW_EXAMPLES, EXAMPLES, STEPS = 8, 50, 70
# No timer of the store runs out by itself: the rules let time pass.
TIMELESS: dict[str, Any] = {"lease_ttl_s": 3600.0, "poll_interval_s": 0.02, "attempt_grace_s": 0.0}
OVERDUE = {
    "timeout": "update item set leased_at = now() - interval '1 day' where id = $1",
    "deadline": "update item set deadline = now() - interval '1 second' where id = $1",
    "cancel": "update item set cancel_by = now() - interval '1 second' where id = $1",
}


class Store:
    """The replicas that all examples share; each example has a project of its own."""

    def __init__(self, loop: asyncio.Runner, handles: Sequence[StoreHandle], dsn: str) -> None:
        self._loop, self._handles, self._dsn = loop, list(handles), dsn
        self._numbers = itertools.count(1)

    def world(self) -> World:
        """Makes a new project."""
        world = World(self._loop, self._handles, self._dsn, f"projects/model-{next(self._numbers)}")
        world.run(world.start())
        return world


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """Yields two replicas on one database, called from tests that are not coroutines."""
    server = shared_server()
    dsn = server.fresh_database()
    with asyncio.Runner() as loop:
        stack = AsyncExitStack()
        try:
            handles = loop.run(stack.enter_async_context(replicas(dsn, 2, **TIMELESS)))
            yield Store(loop, handles, dsn)
        finally:
            loop.run(stack.aclose())
    server.drop(dsn)


class Queue(QueueClients):
    """Everything that may happen to the rollouts of one project."""

    # Ends of attempts.

    def _report(self, replica: int, lease: Lease, kind: FailureKind, message: str, by_stream: bool) -> int:
        results = [
            lease_pb2.AttemptResult(
                attempt=lease.attempt,
                lease_id=lease.session,
                epoch=lease.epoch,
                failure_kind=kind,
                failure_message=message,
            )
        ]
        streams = [stream for stream in self.streams() if stream.replica == replica]
        if by_stream and streams:
            # Whoever brings a report: what counts is the lease.
            self.heard.add((replica, streams[0].session))
            (status,) = self.world.run(streams[0].report(results))
            return status
        request = lease_service_pb2.CompleteAttemptsRequest(results=results)
        (ack,) = self.world.run(self.world.stubs[replica].leases.CompleteAttempts(request)).acks
        return int(ack.status)

    @rule(
        replica=replica_numbers,
        number=picks,
        kind=kinds,
        by_stream=st.booleans(),
    )
    @when(lambda self: self.leases())
    def report(self, replica: int, number: int, kind: FailureKind, by_stream: bool) -> None:
        lease = pick(self.leases(), number)
        status = self._report(replica, lease, kind, "reported", by_stream)
        assert status == self.model.reported(lease, kind, "reported") == APPLIED

    @rule(replica=replica_numbers, number=picks, kind=kinds)
    @when(lambda self: self.leases())
    def report_from_the_dead(self, replica: int, number: int, kind: FailureKind) -> None:
        """A session gives a lease back, gets the rollout again if it can, and then reports the first attempt."""
        lease = pick(self.leases(), number)
        if lease.session in self.model.ended_sessions:
            return
        request = lease_service_pb2.ReleaseLeasesRequest(runner=runner_name(lease.session), attempts=[lease.attempt])
        assert self.world.run(self.world.stubs[replica].leases.ReleaseLeases(request)).released_count == 1
        self.model.released([lease])
        for stream in self.streams():
            if stream.session == lease.session:
                self.world.run(stream.demand(1))
                self.heard.add((stream.replica, stream.session))
        self.world.run(self.world.settle())
        assert self._report(replica, lease, kind, "reported", by_stream=False) == LEASE_LOST

    @rule(replica=replica_numbers, number=picks, kind=kinds, by_stream=st.booleans())
    @when(lambda self: self.model.past())
    def report_what_is_over(self, replica: int, number: int, kind: FailureKind, by_stream: bool) -> None:
        again = [lease for lease in self.model.past() if self.model.rollouts[lease.name].holder == lease.session]
        lease = pick(again or self.model.past(), number)
        if lease.name in {one.name for one in self.world.slow}:
            return
        status = self._report(replica, lease, kind, "reported", by_stream)
        assert status == self.model.reported(lease, kind, "reported")
        assert status in (DUPLICATE, LEASE_LOST)

    @rule(replica=replica_numbers, number=picks, ahead=st.sampled_from([0, 0, -1, 1]), other=picks, kind=kinds)
    @when(lambda self: self.leases())
    def report_what_was_never_leased(
        self, replica: int, number: int, ahead: int, other: int, kind: FailureKind
    ) -> None:
        lease = pick(self.leases(), number)
        wrong = Lease(lease.name, pick(self.sessions(), other), max(1, lease.epoch + ahead))
        if wrong in (lease, *self.model.past()):
            return
        assert self._report(replica, wrong, kind, "reported", by_stream=False) == LEASE_LOST

    @rule(number=picks, kind=kinds)
    @when(lambda self: self.leases())
    def report_to_both_replicas_at_once(self, number: int, kind: FailureKind) -> None:
        lease = pick(self.leases(), number)
        result = lease_pb2.AttemptResult(
            attempt=lease.attempt, lease_id=lease.session, epoch=lease.epoch, failure_kind=kind, failure_message="twice"
        )
        request = lease_service_pb2.CompleteAttemptsRequest(results=[result])

        async def race() -> list[int]:
            answers = await asyncio.gather(*(stubs.leases.CompleteAttempts(request) for stubs in self.world.stubs))
            return sorted(answer.acks[0].status for answer in answers)

        assert self.world.run(race()) == [APPLIED, DUPLICATE]
        self.model.reported(lease, kind, "twice")

    @rule(replica=replica_numbers, number=picks)
    @when(lambda self: self.leases())
    def report_while_it_is_cancelled(self, replica: int, number: int) -> None:
        lease = pick(self.leases(), number)
        result = lease_pb2.AttemptResult(attempt=lease.attempt, lease_id=lease.session, epoch=lease.epoch)
        completion = lease_service_pb2.CompleteAttemptsRequest(results=[result])

        async def race() -> tuple[int, int]:
            completed, cancelled = await asyncio.gather(
                self.world.stubs[replica].leases.CompleteAttempts(completion),
                self.world.stubs[1 - replica].rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=[lease.name])),
            )
            return completed.acks[0].status, cancelled.cancelling_count

        status, asked = self.world.run(race())
        assert status == APPLIED
        if asked:
            self.model.cancelled([lease.name])
        self.model.reported(lease, FailureKind.NONE, "")

    @rule(number=picks)
    @when(lambda self: self.leases())
    def begin_to_end_slowly(self, number: int) -> None:
        if len(self.world.slow) < 2:
            self.world.run(self.world.begin_slowly(pick(self.leases(), number)))

    @rule(number=picks, commit=st.booleans())
    @when(lambda self: self.world.slow)
    def come_to_an_end(self, number: int, commit: bool) -> None:
        self.world.run(self.world.finish_slowly(pick(list(self.world.slow), number), commit=commit))

    @rule(number=picks, by=picks)
    @when(lambda self: self.leases() and self.streams())
    def release(self, number: int, by: int) -> None:
        lease, stream = pick(self.leases(), number), pick(self.streams(), by)
        self.heard.add((stream.replica, stream.session))
        (status,) = self.world.run(stream.release([lease.attempt]))
        # A stream gives back what its own session holds.
        is_own = stream.session == lease.session
        assert status == (APPLIED if is_own else LEASE_LOST)
        assert self.model.released([lease] if is_own else []) == is_own

    @rule(replica=replica_numbers, number=picks, some=st.booleans())
    @when(lambda self: self.sessions())
    def release_by_call(self, replica: int, number: int, some: bool) -> None:
        session = pick(self.sessions(), number)
        held = self.model.held_by(session)
        if not self.is_free(session) or (some and not held):
            return
        chosen = held[:1] if some else held
        request = lease_service_pb2.ReleaseLeasesRequest(
            runner=runner_name(session), attempts=[lease.attempt for lease in chosen] if some else []
        )
        call = self.world.stubs[replica].leases.ReleaseLeases(request)
        if session in self.model.ended_sessions:
            with pytest.raises(SessionEnded):
                self.world.run(call)
            return
        assert self.world.run(call).released_count == self.model.released(chosen)
        if not some:
            self.model.ended_sessions.add(session)

    # What ends without the runner.

    @rule(replica=replica_numbers, numbers=st.lists(picks, min_size=1, max_size=3))
    @when(lambda self: self.touchable())
    def cancel(self, replica: int, numbers: list[int]) -> None:
        names = sorted({pick(self.touchable(), number).name for number in numbers})
        call = self.world.stubs[replica].rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=names))
        answer = self.world.run(call)
        assert (answer.cancelled_count, answer.cancelling_count) == self.model.cancelled(names)

    @rule(replica=replica_numbers, number=picks)
    @when(lambda self: self.sessions())
    def expire(self, replica: int, number: int) -> None:
        session = pick(self.sessions(), number)
        held = self.model.held_by(session)
        # A rollout that loses two runners beside others runs alone from then on: see test_lost_runners.py.
        in_doubt = len(held) > 1 and any(self.model.rollouts[lease.name].lost_runners for lease in held)
        if session not in self.model.ended_sessions and self._may_sweep(session) and not in_doubt:
            update = "update runner_session set lease_until = now() - interval '1 second' where id = $1"
            self.world.run(self.world.alter(update, session))
            self._sweep(replica, session)

    def _sweep(self, replica: int, *expired: str) -> None:
        self.model.ended_sessions.update(expired)
        for session in expired:
            held = self.model.held_by(session)
            self.model.expired |= dict.fromkeys(held, len(held))
        lost = self.model.swept()
        assert self.world.run(self.role(replica, "lease-sweeper").sweep_once()) == lost
        for stream in self.streams():
            if stream.replica == replica and stream.session in expired:
                self.world.run(stream.gone())

    @rule(replica=replica_numbers)
    def sweep(self, replica: int) -> None:
        if self._may_sweep():
            self._sweep(replica)

    def _may_sweep(self, *expired: str) -> bool:
        """True if a sweep need not wait for an attempt that is being ended."""
        return all(self.is_free(session) for session in (*self.model.ended_sessions, *expired))

    @rule(replica=replica_numbers, number=picks, why=st.sampled_from(sorted(OVERDUE)))
    @when(lambda self: self.leases())
    def overrun(self, replica: int, number: int, why: str) -> None:
        lease = pick(self.leases(), number)
        rollout = self.model.rollouts[lease.name]
        if why == "cancel" and not rollout.cancel_asked:
            return
        self.world.run(self.world.alter(OVERDUE[why], parse_rollout_name(lease.name).rollout_id))
        assert self.world.run(self.role(replica, "overdue").end_attempts()) == 1
        kind = FailureKind.CANCELLED if why == "cancel" else FailureKind.TIMEOUT
        rollout.end(kind, None, past_deadline=why == "deadline")

    @rule(replica=replica_numbers, number=picks)
    @when(lambda self: self.model.in_state(RolloutState.QUEUED, RolloutState.RETRY_WAIT))
    def pass_the_deadline(self, replica: int, number: int) -> None:
        rollout = pick(self.model.in_state(RolloutState.QUEUED, RolloutState.RETRY_WAIT), number)
        rollout_id = parse_rollout_name(rollout.name).rollout_id

        async def pass_it() -> None:
            await self.world.alter(OVERDUE["deadline"], rollout_id)
            # The other replica's own timer may be at it.
            while await self.world.database.fetchval("select count(*) from item where id = $1", rollout_id):
                await self.role(replica, "overdue").fail_waiting()

        self.world.run(pass_it())
        rollout.move(RolloutState.FAILED)
        rollout.failure_kind = FailureKind.TIMEOUT

    @rule(replica=replica_numbers, number=picks, again=st.booleans())
    @when(lambda self: self.touchable())
    def run_again(self, replica: int, number: int, again: bool) -> None:
        rollout = pick(self.touchable(), number)
        request = pb.RetryRolloutsRequest(names=[rollout.name], request_id=f"retry-{next(self.numbers)}")
        if rollout.state not in FINAL_STATES:
            with pytest.raises(RolloutStateInvalid):
                self.world.run(self.world.stubs[replica].rollouts.RetryRollouts(request))
            return
        (new,) = self.world.run(self.world.stubs[replica].rollouts.RetryRollouts(request)).rollouts
        # The answer has the new one's name and state only.
        copy = rollout_pb2.Rollout(
            project=self.world.project, priority=rollout.request.priority, policy=rollout.request.policy
        )
        self.model.created([new.name], [copy])
        if again:
            (same,) = self.world.run(self.world.stubs[1 - replica].rollouts.RetryRollouts(request)).rollouts
            assert same.name == new.name

    # Readers and spans.

    @rule(replica=replica_numbers, reader=st.integers(0, 1))
    def move_reader(self, replica: int, reader: int) -> None:
        self.world.run(self.world.watchers[reader].follow(self.world.stubs[replica]))

    @rule(replica=replica_numbers, number=picks, twice=st.booleans())
    @when(lambda self: self.model.past() or self.model.held())
    def append_spans(self, replica: int, number: int, twice: bool) -> None:
        attempt = pick([*self.model.past(), *self.model.held()], number).attempt
        chunk = chunk_of(attempt, 1)
        for stubs in (self.world.stubs[replica], self.world.stubs[1 - replica])[: 1 + twice]:
            answer = self.world.run(append(stubs, chunk))
            assert (answer.accepted_count, list(answer.rejected)) == (1, [])
        self.spans.setdefault(attempt, set()).add(chunk.chunk_id)

    # What always holds.

    @invariant()
    def the_store_is_as_the_model(self) -> None:
        if not self.is_idle:
            self.world.run(self.world.settle())
            self.world.check_watchers()
        self.is_idle = False

    def teardown(self) -> None:
        try:
            # After a failure there is nothing more to find out.
            if sys.exc_info()[0] is None:
                self.world.run(self._end())
        finally:
            self.world.run(self.world.close())

    async def _end(self) -> None:
        for lease in list(self.world.slow):
            await self.world.finish_slowly(lease, commit=True)
        await self.world.settle()
        await self.world.compare_counts()
        await self.world.read_to_the_end()
        for number, name in enumerate(sorted(self.model.rollouts)):
            await self.world.compare_shown(self.world.stubs[number % 2], name)
        for attempt, chunks in self.spans.items():
            found = [chunk.chunk_id for chunk in await stored(self.world.stubs[0], attempt)]
            assert sorted(found) == sorted(chunks)


@pytest.mark.timeout(600 + 60 * SOAK)
@pytest.mark.parametrize("examples", long_after(1, [FEW_EXAMPLES, EXAMPLES * SOAK]))
def test_the_store_does_what_the_model_says(store: Store, examples: int) -> None:
    print(f"{SEED_VARIABLE}={SEED}")
    limits = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=False,
        print_blob=True,
        database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.shrink or given_seed() is not None],
    )
    run_state_machine_as_test(seed(SEED)(lambda: Queue(store.world())), settings=limits)
