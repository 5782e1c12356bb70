"""What the store should do with rollouts, in plain Python: the oracle of the state machine test.

It is written from the contract, not from the store: the one thing taken from the store is the table of transitions, by
which every move of the model is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fulmen.store.v1 import lease_pb2, rollout_pb2
from fulmen_store.rollouts.transitions import FINAL_STATES, TRANSITIONS, FailureKind, RolloutState

__all__ = ["Ended", "Lease", "Modelled", "RolloutModel"]

APPLIED = lease_pb2.COMPLETION_STATUS_APPLIED
DUPLICATE = lease_pb2.COMPLETION_STATUS_DUPLICATE
LEASE_LOST = lease_pb2.COMPLETION_STATUS_LEASE_LOST
BY_DEFAULT = frozenset({FailureKind.LEASE_LOST, FailureKind.INFRA})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An attempt that has ended; `message` is None if the store ended it by itself."""

    number: int
    session: str
    kind: FailureKind
    message: str | None
    next_state: RolloutState


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that somebody has or had."""

    name: str
    session: str
    epoch: int

    @property
    def attempt(self) -> str:
        """The attempt's name."""
        return f"{self.name}/attempts/{self.epoch}"


@dataclass(slots=True, kw_only=True)
class Modelled:
    """One rollout as it should be."""

    name: str
    request: rollout_pb2.Rollout
    state: RolloutState = RolloutState.QUEUED
    failure_kind: FailureKind = FailureKind.NONE
    epoch: int = 0
    charged: int = 0
    lost_runners: int = 0
    holder: str = ""
    cancel_asked: bool = False
    delayed: bool = False
    attempts: list[Ended] = field(default_factory=list)

    @property
    def group(self) -> str:
        """What it is announced with."""
        return self.request.group_id or self.name

    @property
    def is_ready(self) -> bool:
        """Whether any runner with credit must get it."""
        return self.state is RolloutState.QUEUED and not self.delayed

    @property
    def lease(self) -> Lease:
        """The lease that is held."""
        assert self.holder
        return Lease(self.name, self.holder, self.epoch)

    def move(self, *states: RolloutState) -> None:
        """Goes from state to state.

        Raises:
            AssertionError: if the table of transitions does not know the way.
        """
        for state in states:
            assert (self.state, state) in TRANSITIONS, (self.name, self.state, state)
            self.state = state

    def end(
        self, kind: FailureKind, message: str | None, *, past_deadline: bool = False, beside: int | None = None
    ) -> None:
        """Ends the attempt that runs; `beside` is how many attempts its runner ran when it died."""
        self.lost_runners += beside is not None
        policy = self.request.policy
        retried = frozenset(map(FailureKind, policy.retry_on)) or BY_DEFAULT
        charge = 0
        path: tuple[RolloutState, ...]
        if self.cancel_asked or kind is FailureKind.CANCELLED:
            path, self.failure_kind = (RolloutState.CANCELLED,), FailureKind.CANCELLED
        elif kind is FailureKind.NONE:
            path = (RolloutState.SUCCEEDED,)
        elif kind is FailureKind.RELEASED:
            path = (RolloutState.RETRY_WAIT, RolloutState.QUEUED)
        elif kind not in retried or self.charged + 1 >= policy.max_attempts or past_deadline:
            kind = FailureKind.RUNNER_LOST if beside == 1 else kind
            path, self.failure_kind = (RolloutState.FAILED,), kind
        elif beside == 1 and self.lost_runners >= 2:
            kind = FailureKind.RUNNER_LOST
            path, self.failure_kind = (RolloutState.FAILED,), kind
        else:
            # A back-off is nothing or longer than the test.
            path = (RolloutState.RETRY_WAIT, RolloutState.QUEUED)[: 1 if policy.retry_backoff.seconds else 2]
            charge = 1
        self.move(*path)
        ended = Ended(number=self.epoch, session=self.holder, kind=kind, message=message, next_state=path[0])
        self.attempts.append(ended)
        self.charged += charge
        self.holder, self.cancel_asked = "", False


class RolloutModel:
    """All rollouts of one project as they should be."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Modelled] = {}
        self.ended_sessions: set[str] = set()
        # Leases whose session expired, and how many it held then. What it got afterwards never ran.
        self.expired: dict[Lease, int] = {}

    def created(self, names: Sequence[str], requests: Iterable[rollout_pb2.Rollout]) -> None:
        """Takes in new rollouts."""
        for name, request in zip(names, requests, strict=True):
            assert name not in self.rollouts, f"{name} was created twice"
            self.rollouts[name] = Modelled(name=name, request=request, delayed=request.HasField("not_before_time"))

    def leased(self, lease: Lease) -> None:
        """Takes in what a runner was told."""
        rollout = self.rollouts[lease.name]
        assert rollout.is_ready, f"{lease} was given although the rollout is {rollout}"
        assert lease.epoch == rollout.epoch + 1, f"{lease} skips or repeats an attempt of {rollout}"
        rollout.move(RolloutState.RUNNING)
        rollout.epoch, rollout.holder = lease.epoch, lease.session

    def reported(self, lease: Lease, kind: FailureKind, message: str) -> int:
        """Returns the status that a report deserves, and ends the attempt if its lease is held."""
        rollout = self.rollouts[lease.name]
        if rollout.holder and rollout.lease == lease:
            rollout.end(kind, message)
            return APPLIED
        told = (lease.epoch, lease.session, kind, message)
        known = [(each.number, each.session, each.kind, each.message) for each in rollout.attempts]
        return DUPLICATE if told in known else LEASE_LOST

    def released(self, leases: Iterable[Lease]) -> int:
        """Gives leases back; returns how many were held."""
        held = [lease for lease in leases if lease in self.held()]
        for lease in held:
            self.rollouts[lease.name].end(FailureKind.RELEASED, None)
        return len(held)

    def cancelled(self, names: Iterable[str]) -> tuple[int, int]:
        """Cancels rollouts; returns how many are cancelled at once, and how many were asked to stop."""
        counts = [0, 0]
        for name in names:
            rollout = self.rollouts[name]
            if rollout.state is RolloutState.RUNNING:
                rollout.cancel_asked = True
                counts[1] += 1
            elif rollout.state not in FINAL_STATES:
                rollout.move(RolloutState.CANCELLED)
                rollout.failure_kind = FailureKind.CANCELLED
                counts[0] += 1
        return counts[0], counts[1]

    def swept(self) -> int:
        """Loses every lease of a session that is over; returns how many."""
        lost = [lease for lease in self.held() if lease.session in self.ended_sessions]
        for lease in lost:
            self.rollouts[lease.name].end(FailureKind.LEASE_LOST, None, beside=self.expired.get(lease))
        return len(lost)

    def held(self) -> list[Lease]:
        """Returns the leases that are held."""
        return [each.lease for each in self.rollouts.values() if each.holder]

    def held_by(self, session: str) -> list[Lease]:
        """Returns the leases of a session."""
        return [lease for lease in self.held() if lease.session == session]

    def past(self) -> list[Lease]:
        """Returns the leases that are over."""
        return [Lease(each.name, old.session, old.number) for each in self.rollouts.values() for old in each.attempts]

    def in_state(self, *states: RolloutState) -> list[Modelled]:
        """Returns the rollouts in some states."""
        return [each for each in self.rollouts.values() if each.state in states]

    def finished_groups(self) -> set[tuple[str, ...]]:
        """Returns the groups that are to be announced, each as the sorted names of its members."""
        members: dict[str, list[Modelled]] = {}
        for rollout in self.rollouts.values():
            members.setdefault(rollout.group, []).append(rollout)
        return {
            tuple(sorted(each.name for each in group))
            for group in members.values()
            if len(group) == max(1, group[0].request.group_size) and all(one.state in FINAL_STATES for one in group)
        }
