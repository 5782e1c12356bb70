"""The transition table and the retry decision, checked against a model."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fulmen_store.rollouts.transitions import (
    ATTEMPT_ENDS,
    FINAL_STATES,
    MAX_BACKOFF_MS,
    TRANSITIONS,
    AttemptState,
    FailureKind,
    RetryPolicy,
    RolloutState,
    decide,
)

# SUPERSEDED is written beside the end of its rival, and RUNNER_LOST for a LEASE_LOST.
kinds = st.sampled_from([kind for kind in FailureKind if kind not in (FailureKind.SUPERSEDED, FailureKind.RUNNER_LOST)])
policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 100),
    retry_mask=st.frozensets(kinds).map(RetryPolicy.mask_of),
    backoff_ms=st.integers(0, 60_000),
)


def test_final_states_have_no_way_out() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] in FINAL_STATES]


@given(
    kind=kinds,
    policy=policies,
    charged=st.integers(0, 99),
    cancel=st.booleans(),
    jitter=st.floats(-1, 1),
    lost_runners=st.integers(0, 3),
    was_alone=st.booleans(),
)
def test_every_decision_is_a_legal_end(
    kind: FailureKind,
    policy: RetryPolicy,
    charged: int,
    cancel: bool,
    jitter: float,
    lost_runners: int,
    was_alone: bool,
) -> None:
    decision = decide(
        kind,
        policy=policy,
        charged=charged,
        cancel_requested=cancel,
        jitter=jitter,
        lost_runners=lost_runners,
        was_alone=was_alone,
    )
    state = AttemptState.SUCCEEDED if kind is FailureKind.NONE else AttemptState.FAILED
    assert (state, decision.kind or kind, decision.rollout_state) in ATTEMPT_ENDS
    assert (RolloutState.RUNNING, decision.rollout_state) in TRANSITIONS
    assert 0 <= decision.delay_s <= MAX_BACKOFF_MS * 1.25 / 1000
    assert decision.rollout_state is RolloutState.RETRY_WAIT or decision.delay_s == 0


@given(kind=kinds, policy=policies, charged=st.integers(0, 99), cancel=st.booleans())
def test_beside_another_attempt_only_success_and_cancel_decide_and_a_failure_costs_nothing(
    kind: FailureKind, policy: RetryPolicy, charged: int, cancel: bool
) -> None:
    decision = decide(kind, policy=policy, charged=charged, cancel_requested=cancel, hedged=True)
    alone = decide(kind, policy=policy, charged=charged, cancel_requested=cancel)
    if cancel or kind in (FailureKind.NONE, FailureKind.CANCELLED):
        assert decision == alone
        loser = (AttemptState.FAILED, FailureKind.SUPERSEDED, decision.rollout_state)
        assert loser in ATTEMPT_ENDS
    else:
        assert (decision.rollout_state, decision.charge, decision.delay_s) == (RolloutState.RUNNING, 0, 0)
        assert (AttemptState.FAILED, kind, RolloutState.RUNNING) in ATTEMPT_ENDS


def test_the_back_off_doubles_up_to_its_limit() -> None:
    policy = RetryPolicy(max_attempts=100, retry_mask=RetryPolicy.mask_of(frozenset()), backoff_ms=1000)
    delays = [
        decide(FailureKind.INFRA, policy=policy, charged=charged, cancel_requested=False).delay_s
        for charged in range(9)
    ]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_cancelled_and_released_cannot_be_made_retryable_or_final() -> None:
    policy = RetryPolicy(max_attempts=1, retry_mask=RetryPolicy.mask_of(frozenset(FailureKind)), backoff_ms=0)
    cancelled = decide(FailureKind.CANCELLED, policy=policy, charged=0, cancel_requested=False)
    released = decide(FailureKind.RELEASED, policy=policy, charged=0, cancel_requested=False)
    assert cancelled.rollout_state is RolloutState.CANCELLED
    assert (released.rollout_state, released.charge) == (RolloutState.RETRY_WAIT, 0)


def test_a_rollout_is_dead_when_its_second_runner_dies_while_it_runs_there_alone() -> None:
    policy = RetryPolicy(max_attempts=9, retry_mask=RetryPolicy.mask_of(frozenset(FailureKind)), backoff_ms=0)

    def after(lost_runners: int, *, was_alone: bool, max_attempts: int = 9) -> tuple[RolloutState, FailureKind | None]:
        decision = decide(
            FailureKind.LEASE_LOST,
            policy=replace(policy, max_attempts=max_attempts),
            charged=0,
            cancel_requested=False,
            lost_runners=lost_runners,
            was_alone=was_alone,
        )
        return decision.rollout_state, decision.kind

    dead = (RolloutState.FAILED, FailureKind.RUNNER_LOST)
    assert after(1, was_alone=True) == (RolloutState.RETRY_WAIT, None)
    assert after(2, was_alone=True) == dead
    # Nobody knows which of several attempts a runner died of.
    assert after(2, was_alone=False) == (RolloutState.RETRY_WAIT, None)
    assert after(3, was_alone=True) == dead
    assert after(1, was_alone=True, max_attempts=1) == dead
    assert after(1, was_alone=False, max_attempts=1) == (RolloutState.FAILED, None)


class RolloutMachine(RuleBasedStateMachine):
    """Drives one rollout through random ends and checks it against the contract's words."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = RetryPolicy(max_attempts=3, retry_mask=RetryPolicy.mask_of(frozenset()), backoff_ms=10)
        self.state = RolloutState.QUEUED
        self.history = [self.state]
        self.charged = 0
        self.released = 0
        self.attempts = 0
        self.cancel_requested = False

    def _go(self, state: RolloutState) -> None:
        assert (self.state, state) in TRANSITIONS
        self.state = state
        self.history.append(state)

    @precondition(lambda self: self.state is RolloutState.QUEUED)
    @rule()
    def lease(self) -> None:
        self.attempts += 1
        self._go(RolloutState.RUNNING)

    @precondition(lambda self: self.state is RolloutState.RETRY_WAIT)
    @rule()
    def ripen(self) -> None:
        self._go(RolloutState.QUEUED)

    @precondition(lambda self: self.state is RolloutState.RUNNING)
    @rule(kind=kinds)
    def end(self, kind: FailureKind) -> None:
        decision = decide(kind, policy=self.policy, charged=self.charged, cancel_requested=self.cancel_requested)
        self.charged += decision.charge
        self.released += decision.charge == 0
        self._go(decision.rollout_state)

    @rule()
    def cancel(self) -> None:
        if self.state is RolloutState.RUNNING:
            self.cancel_requested = True
        elif self.state not in FINAL_STATES:
            self._go(RolloutState.CANCELLED)

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.charged <= self.policy.max_attempts
        running = self.state is RolloutState.RUNNING
        assert self.attempts == self.charged + self.released + running

    @invariant()
    def a_final_state_is_reached_once(self) -> None:
        assert sum(state in FINAL_STATES for state in self.history) <= 1

    @invariant()
    def a_cancelled_run_never_runs_again(self) -> None:
        if self.cancel_requested:
            assert self.state in (RolloutState.RUNNING, RolloutState.CANCELLED)


TestRolloutMachine = RolloutMachine.TestCase
