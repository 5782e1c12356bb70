"""The clients' half of the state machine test: what producers create, and how runners come and go."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fulmen.errors import ArgumentInvalid, RolloutExists, SessionEnded
from fulmen.ids import parse_rollout_name, parse_runner_name, rollout_name, runner_name, uuid7
from fulmen.store.v1 import lease_service_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.rollouts.transitions import FailureKind, RolloutState
from tests.support.store.model_client import StreamClient
from tests.support.store.model_world import World
from tests.support.store.rollout_model import Lease, Modelled
from tests.support.store.rollouts import moment
from tests.support.store.running import LIMIT_S

__all__ = ["QueueClients", "kinds", "pick", "picks", "replica_numbers", "when"]

# What a runner may report; a success is tried without a look at the lease, and is reported most.
REPORTED = (
    FailureKind.NONE,
    FailureKind.AGENT_ERROR,
    FailureKind.TIMEOUT,
    FailureKind.INFRA,
    FailureKind.REWARD_MISSING,
    FailureKind.CANCELLED,
)
LATER_S = 3600.0

ValueT = TypeVar("ValueT")

kinds = st.sampled_from((*[FailureKind.NONE] * 4, *REPORTED[1:]))
replica_numbers = st.integers(0, 1)
picks = st.integers(0, 2**16)
wishes = st.fixed_dictionaries(
    {
        "is_named": st.booleans(),
        "group_size": st.sampled_from([0, 0, 2, 3]),
        "priority": st.integers(-2, 2),
        "is_delayed": st.sampled_from([False, False, False, True]),
        "max_attempts": st.integers(1, 3),
        "retry_on": st.sets(st.sampled_from((*REPORTED[1:5], FailureKind.LEASE_LOST))),
        "backoff_s": st.sampled_from([0, 0, 0, 60]),
    }
)


def pick(found: Sequence[ValueT], number: int) -> ValueT:
    """Chooses one of several."""
    return found[number % len(found)]


def when(is_possible: Callable[[Any], object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a rule that does nothing where it is not possible.

    Not a precondition: which runner gets what is up to the store, and Hypothesis wants to know which rules can follow.
    """

    def wrap(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def act_if_possible(self: QueueClients, **values: Any) -> None:
            self.is_idle = not is_possible(self)
            if not self.is_idle:
                act(self, **values)

        return act_if_possible

    return wrap


class QueueClients(RuleBasedStateMachine):
    """What producers create, and runners that come and go."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.model = world.model
        self.requests: list[tuple[pb.BatchCreateRolloutsRequest, list[str]]] = []
        self.groups: list[rollout_pb2.Rollout] = []
        self.spans: dict[str, set[str]] = {}
        # Sessions of which a replica heard since it last wrote that down.
        self.heard: set[tuple[int, str]] = set()
        self.numbers = itertools.count(1)
        # Whether the last rule had nothing to do.
        self.is_idle = False

    # What there is.

    def streams(self) -> list[StreamClient]:
        return [stream for stream in self.world.streams if not stream.closed]

    def sessions(self) -> list[str]:
        return sorted({stream.session for stream in self.world.streams})

    def leases(self) -> list[Lease]:
        return [lease for lease in self.model.held() if lease not in self.world.slow]

    def is_free(self, session: str) -> bool:
        """True if no other replica is in the middle of ending an attempt of the session."""
        return all(lease.session != session for lease in self.world.slow)

    def touchable(self) -> list[Modelled]:
        slow = {lease.name for lease in self.world.slow}
        return [rollout for rollout in self.model.rollouts.values() if rollout.name not in slow]

    def role(self, replica: int, name: str) -> Any:
        return self.world.replicas[replica].parts.roles[name]

    # Creating.

    @initialize(
        asked=st.lists(wishes, min_size=2, max_size=5), credit=st.lists(st.integers(0, 5), min_size=2, max_size=3)
    )
    def begin(self, asked: list[dict[str, Any]], credit: list[int]) -> None:
        for number, count in enumerate(credit):
            self.open_session(replica=number % 2)
            if count:
                self.demand(number=number, count=count)
        self.create(0, asked, has_id=True)

    def _rollout(self, wish: dict[str, Any], joined: list[rollout_pb2.Rollout]) -> rollout_pb2.Rollout:
        rollout = rollout_pb2.Rollout(
            name=rollout_name(self.world.project, uuid7()) if wish["is_named"] else "",
            project=self.world.project,
            priority=wish["priority"],
            not_before_time=moment(LATER_S) if wish["is_delayed"] else None,
            policy=rollout_pb2.RolloutPolicy(
                max_attempts=wish["max_attempts"],
                retry_on=sorted(wish["retry_on"]),
                retry_backoff=Duration(seconds=wish["backoff_s"]),
            ),
        )
        if wish["group_size"]:
            known = [each for each in (*self.groups, *joined) if each.group_size == wish["group_size"]]
            is_open = known and sum(each.group_id == known[-1].group_id for each in known) < wish["group_size"]
            rollout.group_id = known[-1].group_id if is_open else f"group-{next(self.numbers)}"
            rollout.group_size = wish["group_size"]
            joined.append(rollout)
        return rollout

    @rule(replica=replica_numbers, asked=st.lists(wishes, min_size=1, max_size=4), has_id=st.booleans())
    def create(self, replica: int, asked: list[dict[str, Any]], has_id: bool) -> None:
        joined: list[rollout_pb2.Rollout] = []
        rollouts = [self._rollout(wish, joined) for wish in asked]
        request = pb.BatchCreateRolloutsRequest(
            rollouts=rollouts, request_id=f"request-{next(self.numbers)}" if has_id else ""
        )
        self.groups += joined
        names = self._create(replica, request)
        assert all(one.name in ("", name) for one, name in zip(rollouts, names, strict=True))
        self.model.created(names, rollouts)
        if has_id or all(one.name for one in rollouts):
            self.requests.append((request, names))

    def _create(self, replica: int, request: pb.BatchCreateRolloutsRequest) -> list[str]:
        response = self.world.run(self.world.stubs[replica].rollouts.BatchCreateRollouts(request))
        return [rollout.name for rollout in response.rollouts]

    @rule(replica=replica_numbers, number=picks)
    @when(lambda self: self.requests)
    def create_again(self, replica: int, number: int) -> None:
        request, names = pick(self.requests, number)
        assert self._create(replica, request) == names

    @rule(replica=replica_numbers, number=picks, is_named=st.booleans())
    def create_what_cannot_be(self, replica: int, number: int, is_named: bool) -> None:
        """Uses a name that is taken, or joins a group that is full."""
        named = [one.request for one in self.model.rollouts.values() if one.request.name]
        found = named if is_named else self._full_groups()
        if not found:
            return
        wrong = rollout_pb2.Rollout()
        wrong.CopyFrom(pick(found, number))
        wrong.input = b"something else"
        if not is_named:
            wrong.ClearField("name")
        with pytest.raises(RolloutExists if is_named else ArgumentInvalid):
            self._create(replica, pb.BatchCreateRolloutsRequest(rollouts=[wrong]))

    def _full_groups(self) -> list[rollout_pb2.Rollout]:
        counts: dict[str, int] = {}
        for each in self.groups:
            counts[each.group_id] = counts.get(each.group_id, 0) + 1
        return [each for each in self.groups if counts[each.group_id] == each.group_size]

    @rule(number=picks)
    @when(lambda self: any(one.delayed for one in self.touchable() if one.state is RolloutState.QUEUED))
    def its_time_comes(self, number: int) -> None:
        found = [one for one in self.touchable() if one.delayed and one.state is RolloutState.QUEUED]
        rollout = pick(found, number)
        rollout.delayed = False
        update = "update item set run_at = now() where id = $1"
        self.world.run(self.world.alter(update, parse_rollout_name(rollout.name).rollout_id))

    # Runners.

    @rule(replica=replica_numbers)
    @when(lambda self: len(self.streams()) < 4)
    def open_session(self, replica: int) -> None:
        stream = StreamClient(replica, self.world.news)
        self.world.run(stream.open(self.world.stubs[replica]))
        self.world.streams.append(stream)

    @rule(number=picks, count=st.integers(1, 3))
    @when(lambda self: self.streams())
    def demand(self, number: int, count: int) -> None:
        stream = pick(self.streams(), number)
        self.world.run(stream.demand(count))
        self.heard.add((stream.replica, stream.session))

    @rule(replica=replica_numbers)
    @when(lambda self: any(one.is_ready for one in self.model.rollouts.values()))
    def acquire(self, replica: int) -> None:
        request = lease_service_pb2.AcquireLeasesRequest(max_count=1, wait=Duration(seconds=int(LIMIT_S / 2)))
        response = self.world.run(self.world.stubs[replica].leases.AcquireLeases(request))
        (given,) = response.assignments
        assert runner_name(given.lease_id) == response.runner
        self.model.leased(Lease(given.rollout.name, given.lease_id, given.epoch))
        # Its stream is given up with the answer.
        self.world.streams.append(StreamClient.of_a_call(replica, str(parse_runner_name(response.runner))))

    @rule(replica=replica_numbers, number=picks)
    @when(lambda self: self.sessions())
    def renew(self, replica: int, number: int) -> None:
        session = pick(self.sessions(), number)
        call = self.world.stubs[replica].leases.RenewLeases(
            lease_service_pb2.RenewLeasesRequest(runner=runner_name(session))
        )
        if session in self.model.ended_sessions:
            with pytest.raises(SessionEnded):
                self.world.run(call)
            return
        answer = self.world.run(call)
        held = self.model.held_by(session)
        assert sorted(answer.held_attempts) == sorted(lease.attempt for lease in held)
        asked = [lease.attempt for lease in held if self.model.rollouts[lease.name].cancel_asked]
        assert sorted(answer.cancelled_attempts) == sorted(asked)

    @rule(number=picks)
    @when(lambda self: self.streams())
    def give_a_sign_of_life(self, number: int) -> None:
        stream = pick(self.streams(), number)
        self.world.run(stream.live())
        self.world.run(self.role(stream.replica, "lease-renewer").renew_once())
        heard = {session for replica, session in self.heard if replica == stream.replica} | {stream.session}
        self.heard = {one for one in self.heard if one[0] != stream.replica}
        for other in self.streams():
            if other.replica == stream.replica and other.session in heard & self.model.ended_sessions:
                self.world.run(other.gone())

    @rule(number=picks)
    @when(lambda self: self.streams())
    def leave(self, number: int) -> None:
        self.world.run(pick(self.streams(), number).leave())

    @rule(replica=replica_numbers, number=picks, forgotten=st.integers(0, 2), knows_past=st.booleans())
    @when(lambda self: self.sessions())
    def resume(self, replica: int, number: int, forgotten: int, knows_past: bool) -> None:
        # Most of all one that has something to lose.
        holders = sorted({lease.session for lease in self.leases()} - self.model.ended_sessions)
        session = pick(holders * 2 + self.sessions(), number)
        held = self.model.held_by(session)
        busy = [lease for lease in held if lease in self.world.slow]
        kept = [lease for lease in held if lease not in busy][forgotten:] + busy
        past = [lease for lease in self.model.past() if lease.session == session][:2] if knows_past else []
        stream = StreamClient(replica, self.world.news)
        opening = stream.open(
            self.world.stubs[replica], session=session, running=[lease.attempt for lease in (*kept, *past)]
        )
        if session in self.model.ended_sessions:
            with pytest.raises(SessionEnded):
                self.world.run(opening)
            return
        self.world.run(opening)
        for older in self.streams():
            if (older.replica, older.session) == (replica, session):
                self.world.run(older.gone())
        self.world.streams.append(stream)
        assert stream.lost == sorted(lease.attempt for lease in past)
        self.model.released(lease for lease in held if lease not in kept)
