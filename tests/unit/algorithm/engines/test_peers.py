"""The tree in which joined engines fetch versions from each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from fulmen_algorithm.engines.peers import PATIENCE_S, Needed, Parent, PeerAddress, PeerTree

VERSION = 7
NEEDED = Needed(VERSION)


@dataclass(eq=False)
class Member:
    number: int
    is_reachable: bool = True
    lags: bool = False

    @property
    def peer(self) -> PeerAddress:
        return PeerAddress(name=str(self.number), target="10.0.0.1:1" if self.is_reachable else "", key="k")

    def may_have(self, needed: Needed) -> bool:
        assert needed == NEEDED
        return not self.lags


def tree_of(count: int, fan_out: int) -> tuple[PeerTree, list[Member]]:
    tree, members = PeerTree(fan_out), [Member(number) for number in range(count)]
    for member in members:
        tree.join(member)
    return tree, members


def parents(tree: PeerTree, members: list[Member]) -> list[int | None]:
    """Returns the number of each member's parent; None for the service."""
    found = [tree.parent_of(member, NEEDED) for member in members]
    return [None if each is None else number_of(each) for each in found]


def number_of(parent: Parent) -> int:
    assert isinstance(parent.engine, Member)
    return parent.engine.number


def test_engines_fetch_in_the_order_of_joining_and_each_has_as_many_children_as_the_service() -> None:
    assert parents(*tree_of(8, 2)) == [None, None, 0, 0, 1, 1, 2, 2]
    assert parents(*tree_of(4, 1)) == [None, 0, 1, 2]
    assert parents(*tree_of(4, 0)) == [None] * 4


@pytest.mark.parametrize("fan_out", [1, 2, 3, 4])
def test_nobody_has_more_children_than_the_fan_out_and_none_is_its_own_forebear(fan_out: int) -> None:
    tree, members = tree_of(64, fan_out)
    found = parents(tree, members)
    assert max(Counter(found).values()) == fan_out
    assert all(parent is None or parent < number for number, parent in enumerate(found))


def test_patience_grows_with_the_distance_from_the_service() -> None:
    tree, members = tree_of(4, 1)
    found = [tree.parent_of(member, NEEDED) for member in members]
    assert [each and each.patience_s for each in found] == [None, PATIENCE_S, 2 * PATIENCE_S, 3 * PATIENCE_S]


def test_one_that_cannot_be_reached_or_lags_behind_has_no_children() -> None:
    tree, members = tree_of(6, 2)
    members[0].is_reachable = False
    members[1].lags = True
    # Nobody is left to fetch from, so those that find no place fetch from the service.
    assert parents(tree, members) == [None, None, None, 2, 2, 3]


def test_the_children_of_one_that_leaves_get_other_parents() -> None:
    tree, members = tree_of(6, 2)
    tree.leave(members[0])
    assert parents(tree, members[1:]) == [None, None, 1, 1, 2]
    assert tree.parent_of(members[0], NEEDED) is None


def test_a_child_that_complains_gets_another_parent_and_others_keep_theirs() -> None:
    tree, members = tree_of(6, 2)
    tree.failed(members[2], members[0])
    assert parents(tree, members) == [None, None, 1, 0, 0, 1]


def test_one_of_which_two_children_complain_has_none() -> None:
    tree, members = tree_of(6, 2)
    tree.failed(members[2], members[0])
    tree.failed(members[2], members[0])
    assert 0 in parents(tree, members)
    tree.failed(members[3], members[0])
    assert 0 not in parents(tree, members)


def test_one_that_complains_of_two_parents_has_the_service_alone() -> None:
    tree, members = tree_of(6, 2)
    for parent in members[:2]:
        tree.failed(members[5], parent)
    assert parents(tree, members)[5] is None
    assert 0 in parents(tree, members)
    assert 1 in parents(tree, members)


def test_what_is_known_of_an_engine_is_forgotten_when_it_leaves() -> None:
    tree, members = tree_of(3, 1)
    tree.failed(members[2], members[1])
    assert parents(tree, members) == [None, 0, None]
    tree.leave(members[1])
    tree.join(members[1])
    assert parents(tree, [members[0], members[2], members[1]]) == [None, 0, 2]
    tree.failed(Member(9), members[0])
    assert parents(tree, [members[0], members[2], members[1]]) == [None, 0, 2]
