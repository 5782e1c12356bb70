"""What is noted of runners until the next renewal: nothing is lost, nothing is counted twice."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.rollouts.transitions import FailureKind, RolloutState
from fulmen_store.runners.session_updates import SessionUpdates
from fulmen_store.scheduling.fair_queue import ReadyItem

SESSIONS = [UUID(int=number) for number in range(1, 4)]
sessions = st.sampled_from(SESSIONS)


def ended(session_id: UUID, kind: FailureKind) -> EndedAttempt:
    """Makes an ended attempt."""
    return EndedAttempt(
        item=ReadyItem(rollout_id=UUID(int=9), project_id=1),
        session_id=session_id,
        epoch=1,
        kind=kind,
        rollout_state=RolloutState.FAILED,
    )


def test_only_what_says_something_of_the_runner_is_counted() -> None:
    notes = SessionUpdates()
    notes.ended(ended(SESSIONS[0], kind) for kind in FailureKind)
    (sign,) = notes.drain([])
    assert (sign.ended, sign.failed) == (7, 6)
    assert not sign.active
    assert notes.drain([]) == []


def test_who_was_heard_is_renewed_also_without_a_note() -> None:
    (sign,) = SessionUpdates().drain([SESSIONS[1]])
    assert (sign.session_id, sign.active, sign.load, sign.ended) == (SESSIONS[1], True, None, 0)


def test_the_load_that_was_said_last_is_written() -> None:
    notes = SessionUpdates()
    notes.load(SESSIONS[0], b"old")
    signs = notes.drain([])
    notes.load(SESSIONS[0], b"new")
    notes.restore(signs)
    assert [sign.load for sign in notes.drain([])] == [b"new"]


actions = st.one_of(
    st.tuples(st.just("end"), sessions, st.sampled_from(FailureKind)),
    st.tuples(st.just("write"), st.booleans(), st.just(None)),
)


@given(st.lists(actions, max_size=60))
def test_whatever_fails_to_be_written_is_written_later(
    steps: list[tuple[str, UUID | bool, FailureKind | None]],
) -> None:
    notes = SessionUpdates()
    expected = dict.fromkeys(SESSIONS, 0)
    written = dict.fromkeys(SESSIONS, 0)

    def write(succeeds: bool) -> None:
        signs = notes.drain(SESSIONS[:1])
        if not succeeds:
            notes.restore(signs)
            return
        for sign in signs:
            written[sign.session_id] += sign.ended

    for what, subject, kind in steps:
        if what == "end" and isinstance(subject, UUID) and kind is not None:
            notes.ended([ended(subject, kind)])
            expected[subject] += kind not in (FailureKind.CANCELLED, FailureKind.RELEASED, FailureKind.SUPERSEDED)
        elif isinstance(subject, bool):
            write(subject)
    write(True)
    assert written == expected
