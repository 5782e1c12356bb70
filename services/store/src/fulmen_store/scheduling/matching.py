"""Assigns waiting items to runner streams: items in queue order, streams in turn, affinity as the tie-breaker.

A round gives each stream at most one item. An item is assigned to a stream whose last item had the same group or
agent version, if the round has one left; otherwise to the stream whose turn it is.

Items that run alone are matched first: each takes a whole idle stream. If none is idle, one stream gets nothing new until
it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from fulmen_store.scheduling.fair_queue import FairQueue, Labels, ReadyItem
from fulmen_store.scheduling.runner_streams import RunnerStream

__all__ = ["Choice", "match", "unmatched_labels"]

Choice = tuple[ReadyItem, RunnerStream]


def match(ready: FairQueue, waiting_streams: Sequence[RunnerStream], *, limit: int) -> list[Choice]:
    """Removes items from the queue and credit from the streams until either runs out.

    Args:
        ready: Waiting items.
        waiting_streams: Streams with credit, in turn order.
        limit: Maximum number of choices.
    """
    choices = _match_alone(ready, waiting_streams, limit)
    waiting_streams = [stream for stream in waiting_streams if not stream.alone]
    while waiting_streams and len(choices) < limit:
        waiting_streams = _round(ready, waiting_streams, limit, choices)
    return choices


def unmatched_labels(ready: FairQueue, streams: Iterable[RunnerStream], project_id: int) -> list[tuple[Labels, int]]:
    """Returns the label sets required by a project's waiting items that no stream has, with their counts."""
    if not ready.terms_of(project_id).rules.match_labels:
        return []
    offers = {stream.labels for stream in streams if stream.projects is None or project_id in stream.projects}
    return [
        (labels, count)
        for labels, count in ready.count_by_labels(project_id).items()
        if not any(labels <= offered for offered in offers)
    ]


def _match_alone(ready: FairQueue, waiting_streams: Sequence[RunnerStream], limit: int) -> list[Choice]:
    """Assigns items that run alone to idle streams; keeps one busy stream for the next such item."""
    choices: list[Choice] = []
    for stream in waiting_streams:
        if stream.leases:
            continue
        # Whatever ran there alone has ended.
        stream.alone = False
        item = ready.pop(stream.labels, stream.projects, alone=True) if len(choices) < limit else None
        if item is not None:
            stream.assign(item)
            stream.alone = True
            choices.append((item, stream))
    busy = [stream for stream in waiting_streams if stream.leases]
    able = [stream for stream in busy if ready.has_alone_for(stream.labels, stream.projects)]
    if able and not any(stream.alone for stream in busy):
        min(able, key=lambda stream: len(stream.leases)).alone = True
    return choices


def _round(
    ready: FairQueue, waiting_streams: Sequence[RunnerStream], limit: int, choices: list[Choice]
) -> list[RunnerStream]:
    """Assigns at most one item to each stream; returns those with credit left."""
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
            taker.assign(item)
            choices.append((item, taker))
            del waiting[taker]
            if taker.can_take:
                still_waiting.append(taker)
    return still_waiting


class _LastRuns:
    """Streams by their last group and agent version."""

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
        """Returns a stream with more affinity than the one whose turn it is, or None."""
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
