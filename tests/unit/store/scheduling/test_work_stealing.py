"""Every rollout is one replica's own work, shares are even, and others' work is taken late, from the far end, in time."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.ids import uuid7
from fulmen_store.replicas.live_replicas import BUCKETS, LiveReplicas, Replica, Shares
from fulmen_store.scheduling.fair_queue import ReadyItem
from fulmen_store.scheduling.work_stealing import LAG_LIMIT_MS, STEAL_DELAY_S, WorkStealer
from tests.support.store.manual_clock import ManualClock

IDS = st.lists(st.uuids(), min_size=1, max_size=6, unique=True)
PAGE_ROWS = 100


def replica(replica_id: UUID, *, runner_count: int = 1) -> Replica:
    return Replica(replica_id=replica_id, address="none:1", runner_count=runner_count)


def views(ids: list[UUID]) -> dict[UUID, Shares]:
    """Returns the shares as each of the replicas sees them."""
    return {own: Shares(own, [replica(other) for other in ids if other != own]) for own in ids}


@settings(deadline=None)
@given(IDS)
def test_replicas_that_know_one_another_agree_on_the_order_of_preference(ids: list[UUID]) -> None:
    shares = views(ids)
    for bucket in range(BUCKETS):
        assert sorted(each.rank(UUID(int=bucket)) for each in shares.values()) == list(range(len(ids)))


@settings(deadline=None)
@given(IDS, st.data())
def test_a_replica_that_goes_leaves_everybody_elses_share_where_it_was(ids: list[UUID], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(ids))
    before, after = views(ids), views([one for one in ids if one != gone])
    for bucket in range(BUCKETS):
        key = UUID(int=bucket)
        for replica_id, shares in after.items():
            if before[replica_id].rank(key) == 0:
                assert shares.rank(key) == 0


def test_shares_are_about_even() -> None:
    shares = views([uuid7() for _ in range(3)])
    counts = Counter(
        own for own, each in shares.items() for bucket in range(BUCKETS) if not each.rank(UUID(int=bucket))
    )
    assert sum(counts.values()) == BUCKETS
    assert all(40 <= count <= 140 for count in counts.values()), counts


def test_a_replica_without_runners_has_no_share_in_the_eyes_of_others() -> None:
    own, idle = uuid7(), uuid7()
    known = LiveReplicas(own)
    known.update([replica(idle, runner_count=0)])
    assert {known.rank(UUID(int=bucket)) for bucket in range(BUCKETS)} == {0}
    known.update([replica(idle)])
    assert {known.rank(UUID(int=bucket)) for bucket in range(BUCKETS)} == {0, 1}


class Preference:
    """Live replicas of which `rank` are preferred to this one for every odd number."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self, key: UUID) -> int:
        return self._rank if key.int % 2 else 0


def item(number: int, *, born_ms: int = 1_000_000, labels: frozenset[str] = frozenset()) -> ReadyItem:
    return ReadyItem(rollout_id=UUID(int=born_ms << 80 | number), project_id=1, labels=labels)


def others_work(clock: ManualClock, *, rank: int = 1) -> WorkStealer:
    """Returns the work of others where every odd number is of others, with this replica at `rank`."""
    return WorkStealer(Preference(rank), clock=clock)


def test_others_work_waits_a_moment_for_its_preferred_replica() -> None:
    clock = ManualClock()
    work = others_work(clock)
    assert work.due() == frozenset()
    work.seen(1)
    assert work.due() == frozenset()
    clock.now_s += STEAL_DELAY_S
    assert work.due() == {1}


def test_what_is_taken_is_others_and_from_the_far_end_and_never_all() -> None:
    work = others_work(ManualClock())
    page = [(item(number), 0.0) for number in range(PAGE_ROWS)]
    others = work.fitting(page, lambda _item: True)
    assert others == [one for one, _ in page if one.rollout_id.int % 2]
    for credit in (1, PAGE_ROWS):
        assert work.choose(others, project_id=1, credit=credit, more=False) == others[-PAGE_ROWS // 4 :]
    assert work.choose(others[:1], project_id=1, credit=1, more=False) == others[:1]


def test_the_third_choice_waits_longer_than_the_second() -> None:
    clock = ManualClock()
    work = others_work(clock, rank=2)
    work.seen(1)
    clock.now_s += STEAL_DELAY_S
    assert work.choose([item(1)], project_id=1, credit=1, more=False) == []
    assert work.due() == frozenset()
    clock.now_s += STEAL_DELAY_S
    assert work.due() == {1}
    assert work.choose([item(1)], project_id=1, credit=1, more=False) == [item(1)]


def test_only_what_fits_idle_credit_and_may_run_is_taken() -> None:
    gpu = frozenset({"gpu=yes"})
    page = [(item(1, labels=gpu), 0.0), (item(3), 5.0), (item(5), 0.0)]
    found = others_work(ManualClock()).fitting(page, lambda one: not one.labels)
    assert [one.rollout_id.int & 0xFF for one in found] == [5]


def test_what_has_waited_far_longer_than_this_replicas_own_work_is_taken_with_it() -> None:
    work = others_work(ManualClock())
    old, young, own = item(1), item(3, born_ms=1_000_000 + LAG_LIMIT_MS), item(2, born_ms=1_000_001 + LAG_LIMIT_MS)
    assert work.overdue([(old, 0.0), (young, 0.0), (own, 0.0)]) == [old]
    assert work.overdue([(old, 0.0), (young, 0.0)]) == []
    assert work.overdue([(own, 0.0), (old, 0.0)]) == []
