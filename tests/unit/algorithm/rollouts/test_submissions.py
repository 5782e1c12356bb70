"""Which training groups are submitted next: each index once, in order, also around those that an earlier life left."""

from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.runs.progress import IndexSet, Progress, Submissions


@given(known=st.sets(st.integers(0, 30)), counts=st.lists(st.integers(0, 7), max_size=8))
def test_every_missing_group_is_submitted_once_and_in_order(known, counts):
    submissions = Submissions.recovered(Progress(), known)
    sent: list[int] = []
    for count in counts:
        indices = submissions.upcoming(count)
        assert len(indices) == count
        submissions.done(indices)
        sent += indices
    assert sent == [i for i in range(31 + sum(counts)) if i not in known][: len(sent)]
    assert submissions.count == len(known | set(sent))


def test_groups_that_were_consumed_are_not_submitted_again():
    progress = Progress(consumed=IndexSet(below=4, above=frozenset({5, 7})))
    submissions = Submissions.recovered(progress, {4, 8})
    assert submissions.upcoming(3) == [6, 9, 10]
    submissions.done([6, 9])
    assert (submissions.next_index, submissions.upcoming(1)) == (10, [10])
