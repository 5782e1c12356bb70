"""Who gets what: turns, credit, and affinity as the breaker of ties."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from fulmen_store.leases.leases import LeasedAttempt
from fulmen_store.scheduling.fair_queue import FairQueue, ReadyItem
from fulmen_store.scheduling.matching import match
from fulmen_store.scheduling.rules import QueueRules, QueueTerms
from fulmen_store.scheduling.runner_streams import RunnerStream, RunnerStreams
from tests.support.store.scheduling import ready_item, runner_stream

ONE, TWO = UUID(int=1), UUID(int=2)


def stream(credit: int = 1, *, group: UUID | None = None, agent: int | None = None, **fields: Any) -> RunnerStream:
    taken = runner_stream(credit=credit, **fields)
    taken.last_group, taken.last_agent = group, agent
    return taken


def ready(*items: ReadyItem, rules: QueueRules | None = None) -> FairQueue:
    queue = FairQueue()
    if rules is not None:
        queue.learn(1, QueueTerms(rules=rules))
    for one in items:
        queue.push(one)
    return queue


def test_streams_take_turns_and_no_more_than_their_credit() -> None:
    one, two = stream(3), stream(1)
    items = [ready_item() for _ in range(6)]
    choices = match(ready(*items), [one, two], limit=100)
    assert choices == [(items[0], one), (items[1], two), (items[2], one), (items[3], one)]
    assert (one.credit, two.credit) == (0, 0)


def test_a_stream_that_ran_the_group_last_goes_before_its_turn() -> None:
    stranger, knows_agent, knows_group = stream(), stream(agent=4), stream(group=TWO)
    items = [ready_item(group_key=TWO, agent=4), ready_item(group_key=ONE, agent=4), ready_item()]
    choices = match(ready(*items), [stranger, knows_agent, knows_group], limit=100)
    assert choices == [(items[0], knows_group), (items[1], knows_agent), (items[2], stranger)]


def test_affinity_never_gives_a_stream_two_turns_nor_changes_the_order_of_items() -> None:
    first, knows = stream(2), stream(2, group=ONE)
    items = [ready_item(group_key=ONE) for _ in range(4)]
    choices = match(ready(*items), [first, knows], limit=100)
    assert [chosen for chosen, _ in choices] == items
    assert [taker for _, taker in choices[:2]] == [knows, first]
    assert (first.credit, knows.credit) == (0, 0)


def test_without_the_rule_turns_alone_decide() -> None:
    first, knows = stream(), stream(group=ONE)
    choices = match(ready(ready_item(group_key=ONE), rules=QueueRules(affinity=False)), [first, knows], limit=100)
    assert [taker for _, taker in choices] == [first]


def test_affinity_does_not_reach_a_stream_that_may_not_run_the_item() -> None:
    able = stream(labels=frozenset({"gpu=1"}))
    unable, elsewhere = stream(group=ONE), stream(group=ONE, projects=frozenset({2}))
    choices = match(ready(ready_item(group_key=ONE, labels=frozenset({"gpu=1"}))), [able, unable, elsewhere], limit=100)
    assert [taker for _, taker in choices] == [able]


def test_a_match_stops_at_its_limit_and_takes_no_credit_beyond_it() -> None:
    one = stream(10)
    queue = ready(*(ready_item() for _ in range(10)))
    assert len(match(queue, [one], limit=4)) == 4
    assert (one.credit, len(queue)) == (6, 6)


@given(
    credits_=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    groups=st.lists(st.integers(0, 2), max_size=25),
    affinity=st.booleans(),
)
def test_as_much_is_handed_out_as_work_and_credit_allow_in_the_order_of_the_queue(
    credits_: list[int], groups: list[int], affinity: bool
) -> None:
    items = [ready_item(group_key=UUID(int=group) if group else None) for group in groups]
    streams = [stream(each) for each in credits_]
    choices = match(ready(*items, rules=QueueRules(affinity=affinity)), streams, limit=1000)
    assert [chosen for chosen, _ in choices] == items[: sum(credits_)]
    assert all(one.credit >= 0 for one in streams)
    assert sum(one.credit for one in streams) == sum(credits_) - len(choices)


def test_new_work_goes_to_a_waiting_stream_that_ran_its_like_and_otherwise_by_turns() -> None:
    streams, first, knows_agent, knows_group = RunnerStreams(), stream(9), stream(9, agent=4), stream(9, group=TWO)
    for one in (first, knows_agent, knows_group):
        streams.attach(one)
    assert streams.next_for(ready_item(group_key=TWO, agent=4)) is knows_group
    assert streams.next_for(ready_item(agent=4)) is knows_agent
    assert streams.next_for(ready_item(agent=4), QueueRules(affinity=False)) is first
    # Who was passed over has kept its turn, and who was served has gone to the end of the line.
    assert [streams.next_for(ready_item()) for _ in range(4)] == [knows_group, knows_agent, first, knows_group]
    assert streams.next_for(ready_item(labels=frozenset({"gpu=1"}))) is None
    assert streams.next_for(ready_item(labels=frozenset({"gpu=1"})), QueueRules(match_labels=False)) is knows_agent


def test_an_item_that_runs_alone_takes_an_idle_stream_as_a_whole() -> None:
    idle, busy = stream(4), stream(4)
    busy.leases[ONE] = LeasedAttempt(1, ONE, 1)
    suspect, other = ready_item(runs_alone=True), ready_item()
    queue = ready(other, suspect)
    assert match(queue, [busy, idle], limit=100) == [(suspect, idle), (other, busy)]
    # Nothing joins it until it has ended.
    idle.leases[suspect.rollout_id] = LeasedAttempt(1, suspect.rollout_id, 1)
    later = ready_item()
    queue.push(later)
    assert match(queue, [idle], limit=100) == []
    idle.leases.clear()
    assert match(queue, [idle], limit=100) == [(later, idle)]


def test_one_busy_stream_gets_nothing_new_until_it_is_idle_for_an_item_that_runs_alone() -> None:
    little, much = stream(4), stream(4)
    little.leases[ONE] = LeasedAttempt(1, ONE, 1)
    much.leases |= {each: LeasedAttempt(1, each, 1) for each in (TWO, UUID(int=3))}
    suspect, other = ready_item(runs_alone=True), ready_item()
    queue = ready(suspect, other)
    assert match(queue, [little, much], limit=100) == [(other, much)]
    assert little.alone
    little.leases.clear()
    assert match(queue, [little, much], limit=100) == [(suspect, little)]


def test_items_of_a_paused_agent_are_not_matched_until_it_is_resumed() -> None:
    paused, other = ready_item(agent=4), ready_item(agent=5)
    queue = ready(paused, other)
    queue.learn(1, QueueTerms(paused_agents=frozenset({4})))
    queue.push(paused)
    assert (match(queue, [stream(3)], limit=100)[0][0], len(queue)) == (other, 0)
    queue.learn(1, QueueTerms())
    queue.push(paused)
    assert [item for item, _ in match(queue, [stream(3)], limit=100)] == [paused]


def test_items_of_a_paused_queue_stay_in_it_and_those_of_others_are_matched() -> None:
    paused, alone = ready_item(), ready_item(runs_alone=True)
    other = ready_item(project_id=2)
    queue = ready(paused, alone, other)
    queue.learn(1, QueueTerms(is_paused=True))
    idle = stream(3)
    assert [item for item, _ in match(queue, [idle], limit=100)] == [other]
    assert (len(queue), idle.alone) == (2, False)
    queue.learn(1, QueueTerms())
    assert [item for item, _ in match(queue, [stream(3), stream(3)], limit=100)] == [alone, paused]
