"""How an attempt stands, for every state that the tables can be in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fulmen_store.leases.attempt_checks import AttemptStatus, Leases, RolloutLeases, check_attempt
from fulmen_store.rollouts.transitions import AttemptState

EPOCHS = st.integers(1, 4)
KNOWN = st.builds(
    RolloutLeases,
    project=st.just("projects/default"),
    mode=st.just(1),
    leases=st.builds(Leases, epochs=st.frozensets(EPOCHS, max_size=2), cancel_requested=st.booleans()),
    ended=st.none() | st.sampled_from([AttemptState.SUCCEEDED, AttemptState.FAILED]),
)


@given(known=KNOWN, number=EPOCHS, epoch=st.integers(0, 4))
def test_only_a_held_lease_of_the_same_epoch_is_live(known: RolloutLeases, number: int, epoch: int) -> None:
    checked = check_attempt(known, number=number, epoch=epoch)
    holds = number in known.leases.epochs and epoch in (0, number)
    assert (checked.status is AttemptStatus.LIVE) == (holds and not known.leases.cancel_requested)
    assert (checked.status is AttemptStatus.CANCEL_REQUESTED) == (holds and known.leases.cancel_requested)


@given(known=KNOWN, number=EPOCHS, epoch=st.integers(0, 4))
def test_an_attempt_is_found_if_it_runs_or_has_ended(known: RolloutLeases, number: int, epoch: int) -> None:
    checked = check_attempt(known, number=number, epoch=epoch)
    exists = number in known.leases.epochs or known.ended is not None
    assert (checked.status is not AttemptStatus.NOT_FOUND) == exists == bool(checked.project)


def test_no_leaks_of_what_is_not_known() -> None:
    checked = check_attempt(None, number=1, epoch=1)
    assert (checked.status, checked.project, checked.current_epoch) == (AttemptStatus.NOT_FOUND, "", 0)
