"""The admission rule: as many groups as the staleness limit allows, never more."""

from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.rollouts.admission import groups_admitted, groups_settled
from fulmen_algorithm.runs.progress import IndexSet

SIZES = st.integers(min_value=1, max_value=8)


@given(
    groups_per_step=SIZES,
    max_staleness=st.integers(min_value=0, max_value=4),
    steps=st.integers(min_value=1, max_value=12),
    looks=st.integers(min_value=0, max_value=40),
    data=st.data(),
)
def test_no_group_is_older_than_the_limit_and_every_step_gets_its_groups(
    groups_per_step, max_staleness, steps, looks, data
):
    running: list[int] = []  # the version at which each group was submitted
    most = groups_per_step + looks
    for version in range(steps):
        kept = seen = 0
        while kept < groups_per_step and seen < most:
            settled = groups_settled(kept=kept, seen=seen, groups_per_step=groups_per_step, max_groups=most)
            admitted = groups_admitted(
                running=len(running),
                kept=settled,
                version=version,
                groups_per_step=groups_per_step,
                max_staleness=max_staleness,
                steps=steps,
            )
            running += [version] * admitted
            assert running, "the step would wait for ever"
            # Groups end roughly in the order of their submission; the feed keeps it here.
            submitted_at = running.pop(0)
            seen += 1
            kept += not data.draw(st.booleans())
            assert version - submitted_at <= max_staleness
    assert not running, "a group was asked for that no step can use"


@given(groups_per_step=SIZES, max_staleness=st.integers(0, 4), version=st.integers(0, 50), running=st.integers(0, 500))
def test_what_is_under_way_stays_within_the_rule(groups_per_step, max_staleness, version, running):
    admitted = groups_admitted(
        running=running,
        kept=0,
        version=version,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        steps=1000,
    )
    accepted = version * groups_per_step
    limit = (max_staleness + version + 1) * groups_per_step
    assert admitted >= 0
    assert admitted == 0 or accepted + running + admitted == limit


@given(st.lists(st.integers(0, 60)))
def test_an_index_set_holds_what_was_put_in_and_nothing_else(indices):
    held = IndexSet()
    for index in indices:
        held = held.with_all([index])
    assert {i for i in range(70) if i in held} == set(indices)
    assert len(held) == len(set(indices))
    assert all(i > held.below for i in held.above)
