"""Which runner gets which item: items keep their order, runners their turns; affinity only breaks ties.

A round gives every seat at most one item. Within a round, an item goes to a seat that ran its group or its agent's
version last, if one still waits for its turn; otherwise to the seat whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from fulmen_store.scheduling.fair_queue import FairQueue, Labels, ReadyItem
from fulmen_store.scheduling.runner_streams import Seat

__all__ = ["Choice", "match", "without_runner"]

Choice = tuple[ReadyItem, Seat]


def match(ready: FairQueue, hungry: Sequence[Seat], *, limit: int) -> list[Choice]:
    """Takes items from the queue and credit from the seats until either is used up.

    Args:
        ready: the waiting items.
        hungry: seats with credit, in turn order.
        limit: at most so many choices.
    """
    choices: list[Choice] = []
    while hungry and len(choices) < limit:
        hungry = _round(ready, hungry, limit, choices)
    return choices


def without_runner(ready: FairQueue, seats: Iterable[Seat], project_id: int) -> list[tuple[Labels, int]]:
    """Returns the label sets of a project's waiting items that no seat has, and how many items wait for them."""
    if not ready.terms_of(project_id).rules.match_labels:
        return []
    offers = {seat.labels for seat in seats if seat.projects is None or project_id in seat.projects}
    return [
        (labels, count)
        for labels, count in ready.count_by_labels(project_id).items()
        if not any(labels <= offered for offered in offers)
    ]


def _round(ready: FairQueue, hungry: Sequence[Seat], limit: int, choices: list[Choice]) -> list[Seat]:
    """Gives each seat one item at most; returns those that take more."""
    waiting = dict.fromkeys(hungry)
    still_hungry: list[Seat] = []
    index: _LastRuns | None = None
    for seat in hungry:
        while seat in waiting and len(choices) < limit:
            item = ready.pop(seat.labels, seat.projects)
            if item is None:
                del waiting[seat]
                break
            taker = seat
            if len(waiting) > 1 and (item.group_key is not None or item.agent is not None):
                if index is None:
                    index = _LastRuns(hungry)
                taker = index.preferred(item, seat, waiting, ready) or seat
            taker.give(item)
            choices.append((item, taker))
            del waiting[taker]
            if taker.credit > 0:
                still_hungry.append(taker)
    return still_hungry


class _LastRuns:
    """Seats by what they ran last."""

    def __init__(self, seats: Iterable[Seat]) -> None:
        self._groups: dict[UUID, list[Seat]] = {}
        self._agents: dict[int, list[Seat]] = {}
        for seat in seats:
            if seat.last_group is not None:
                self._groups.setdefault(seat.last_group, []).append(seat)
            if seat.last_agent is not None:
                self._agents.setdefault(seat.last_agent, []).append(seat)

    def preferred(self, item: ReadyItem, seat: Seat, waiting: dict[Seat, None], ready: FairQueue) -> Seat | None:
        """Returns the seat that goes before the one whose turn it is; None if that one is as good."""
        rules = ready.terms_of(item.project_id).rules
        if not rules.affinity:
            return None
        for own, key, seats in (
            (seat.last_group, item.group_key, self._groups.get(item.group_key, ()) if item.group_key else ()),
            (seat.last_agent, item.agent, self._agents.get(item.agent, ()) if item.agent else ()),
        ):
            if key is not None and own == key:
                return None
            for other in seats:
                if other in waiting and other.qualifies(item, match_labels=rules.match_labels):
                    return other
        return None
