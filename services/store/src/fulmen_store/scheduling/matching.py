"""Which runner gets which item: items keep their order, runners their turns; affinity only breaks ties.

A round gives every stream at most one item. Within a round, an item goes to a stream that ran its group or its agent's
version last, if one still waits for its turn; otherwise to the stream whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from fulmen_store.scheduling.fair_queue import FairQueue, Labels, ReadyItem
from fulmen_store.scheduling.runner_streams import RunnerStream

__all__ = ["Choice", "match", "unmatched_labels"]

Choice = tuple[ReadyItem, RunnerStream]


def match(ready: FairQueue, waiting_streams: Sequence[RunnerStream], *, limit: int) -> list[Choice]:
    """Takes items from the queue and credit from the streams until either is used up.

    Args:
        ready: the waiting items.
        waiting_streams: streams with credit, in turn order.
        limit: at most so many choices.
    """
    choices: list[Choice] = []
    while waiting_streams and len(choices) < limit:
        waiting_streams = _round(ready, waiting_streams, limit, choices)
    return choices


def unmatched_labels(ready: FairQueue, streams: Iterable[RunnerStream], project_id: int) -> list[tuple[Labels, int]]:
    """Returns the label sets of a project's waiting items that no stream has, and how many items wait for them."""
    if not ready.terms_of(project_id).rules.match_labels:
        return []
    offers = {stream.labels for stream in streams if stream.projects is None or project_id in stream.projects}
    return [
        (labels, count)
        for labels, count in ready.count_by_labels(project_id).items()
        if not any(labels <= offered for offered in offers)
    ]


def _round(
    ready: FairQueue, waiting_streams: Sequence[RunnerStream], limit: int, choices: list[Choice]
) -> list[RunnerStream]:
    """Gives each stream one item at most; returns those that take more."""
    waiting = dict.fromkeys(waiting_streams)
    still_waiting: list[RunnerStream] = []
    index: _LastRuns | None = None
    for stream in waiting_streams:
        while stream in waiting and len(choices) < limit:
            item = ready.pop(stream.labels, stream.projects)
            if item is None:
                del waiting[stream]
                break
            taker = stream
            if len(waiting) > 1 and (item.group_key is not None or item.agent is not None):
                if index is None:
                    index = _LastRuns(waiting_streams)
                taker = index.preferred(item, stream, waiting, ready) or stream
            taker.give(item)
            choices.append((item, taker))
            del waiting[taker]
            if taker.credit > 0:
                still_waiting.append(taker)
    return still_waiting


class _LastRuns:
    """RunnerStreams by what they ran last."""

    def __init__(self, streams: Iterable[RunnerStream]) -> None:
        self._groups: dict[UUID, list[RunnerStream]] = {}
        self._agents: dict[int, list[RunnerStream]] = {}
        for stream in streams:
            if stream.last_group is not None:
                self._groups.setdefault(stream.last_group, []).append(stream)
            if stream.last_agent is not None:
                self._agents.setdefault(stream.last_agent, []).append(stream)

    def preferred(
        self, item: ReadyItem, stream: RunnerStream, waiting: dict[RunnerStream, None], ready: FairQueue
    ) -> RunnerStream | None:
        """Returns the stream that goes before the one whose turn it is; None if that one is as good."""
        rules = ready.terms_of(item.project_id).rules
        if not rules.affinity:
            return None
        for own, key, streams in (
            (stream.last_group, item.group_key, self._groups.get(item.group_key, ()) if item.group_key else ()),
            (stream.last_agent, item.agent, self._agents.get(item.agent, ()) if item.agent else ()),
        ):
            if key is not None and own == key:
                return None
            for other in streams:
                if other in waiting and other.qualifies(item, match_labels=rules.match_labels):
                    return other
        return None
