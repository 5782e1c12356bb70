"""Groups of the feed, decoded part by part."""

from __future__ import annotations

from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1.rollout_service_pb2 import FinishedGroup
from fulmen_algorithm.clients.decode import FeedGroups


def part(*names: str, cursor: str = "") -> FinishedGroup:
    """Makes a part of a group."""
    return FinishedGroup(group_id="g", rollouts=[rollout_pb2.Rollout(name=name) for name in names], cursor=cursor)


def test_a_group_is_whole_with_the_part_that_has_its_cursor() -> None:
    groups = FeedGroups()
    assert groups.add(part("a", "b")) is None
    assert groups.add(part("c")) is None
    whole, next_one = groups.add(part("d", cursor="1")), groups.add(part("e", cursor="2"))
    assert whole is not None
    assert next_one is not None
    assert ([one.name for one in whole.rollouts], whole.cursor) == (["a", "b", "c", "d"], "1")
    assert ([one.name for one in next_one.rollouts], next_one.cursor) == (["e"], "2")
