"""A rank leaves a collective whose other ranks are lost, together with its copy of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event

import pytest

from fulmen_exchange.way_out import RanksLost, WayOut


@pytest.fixture
def endless() -> Iterator[Event]:
    """Yields what a collective waits for that nobody ends."""
    event = Event()
    yield event
    event.set()


def test_a_collective_that_ends_gives_its_result():
    assert WayOut(Future()).run(lambda: 7) == 7


def test_a_collective_that_would_never_end_is_left_when_ranks_are_lost(endless):
    left: Future[None] = Future()
    way_out = WayOut(left)

    def collective() -> bool:
        left.set_result(None)  # while it waits
        return endless.wait()

    with pytest.raises(RanksLost):
        way_out.run(collective)
    # The ones after it are not begun.
    with pytest.raises(RanksLost):
        way_out.run(lambda: pytest.fail("a rank that has left began a collective"))
    with pytest.raises(RanksLost):
        way_out.check()


def test_a_collective_that_fails_has_lost_ranks_and_another_error_is_what_it_is():
    def broken() -> None:
        raise RuntimeError("Connection closed by peer")

    way_out = WayOut(Future())
    with pytest.raises(RanksLost):
        way_out.run(broken)
    with pytest.raises(ZeroDivisionError):
        way_out.run(lambda: 1 // 0)
    way_out.check()


def test_a_rank_leaves_with_the_others_of_its_copy_though_its_own_collective_has_ended():
    told: list[bool] = []
    way_out = WayOut(Future())
    way_out.agree = lambda leaves: bool(told.append(leaves)) or len(told) == 2
    assert way_out.run(lambda: 7) == 7
    with pytest.raises(RanksLost):
        way_out.run(lambda: 8)
    assert told == [False, False]


class Waiting:
    """A group as NCCL's: what waits in it goes on when it is aborted, as if it had ended."""

    def __init__(self) -> None:
        self.aborted = Event()

    def abort(self) -> None:
        self.aborted.set()


def test_groups_with_ranks_that_are_lost_are_aborted_before_the_ranks_of_the_copy_agree():
    left: Future[None] = Future()
    way_out, world, peers = WayOut(left), Waiting(), Waiting()
    way_out.groups += [world, peers]

    def collective() -> str:
        left.set_result(None)
        world.aborted.wait()
        return "what an aborted sum has left"

    agreed: list[bool] = []
    way_out.agree = lambda leaves: bool(agreed.append(world.aborted.is_set() and peers.aborted.is_set())) or leaves
    with pytest.raises(RanksLost):
        way_out.run(collective)
    assert agreed == [True]


def test_groups_that_lost_nobody_are_not_aborted():
    way_out, group = WayOut(Future()), Waiting()
    way_out.groups.append(group)
    assert way_out.run(lambda: 7) == 7
    assert not group.aborted.is_set()
