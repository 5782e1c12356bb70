"""Moves spans below those that enclose them in time, as Agent Lightning's `TraceTree.repair_hierarchy` does.

Theirs looks at all spans for each span at the top. Here the spans are in a Fenwick tree over their starts, whose blocks are trees over
ends with the least duration: n spans take O(n log² n) steps, as long as few enclose a span equally closely.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fulmen.compat.agentlightning.exported_spans import SpanNode

__all__ = ["move_below_enclosing"]


def move_below_enclosing(top: SpanNode) -> None:
    """Moves each child below the closest span that encloses it, the first one of several, unless it is the only one left.

    A child whose closest one is below it stays; theirs would lose it with all below it.

    Raises:
        SpansInvalid: If it is no tree; nothing has moved then.
    """
    nodes = [*top.walk()]
    above = {id(child): (node, rank) for node in nodes for rank, child in enumerate(node.children)}
    spans = _Spans(nodes[1:])
    # Where each span was at first; and below which child of the top each child is now.
    home: dict[int, int] = {}
    for place, child in enumerate(top.children):
        for node in child.walk():
            home[id(node)] = place
    led = [*range(len(top.children))]
    kept, count = [], len(top.children)
    for place, child in enumerate(top.children):
        parent = _first(top, spans.closest(child), above) if count > 1 else None
        goal = place if parent is None else home[id(parent)]
        while led[goal] != goal:
            led[goal] = goal = led[led[goal]]
        if parent is None or goal == place:
            kept.append(child)
            continue
        count -= 1
        led[place] = goal
        above[id(child)] = (parent, len(parent.children))
        parent.children.append(child)
    top.children = kept


def _first(top: SpanNode, found: dict[int, SpanNode], above: dict[int, tuple[SpanNode, int]]) -> SpanNode | None:
    """Returns the first in the order of the tree; looks at the ways to them alone."""
    if len(found) < 2:
        return next(iter(found.values()), None)
    ways: dict[int, tuple[int, SpanNode]] = {}
    for each in found.values():
        node = each
        while node is not top:
            parent, rank = above[id(node)]
            known = ways.get(id(parent))
            if known is None or rank < known[0]:
                ways[id(parent)] = (rank, node)
            if known is not None:
                break
            node = parent
    node = top
    while id(node) not in found:
        node = ways[id(node)][1]
    return node


class _Spans:
    """Spans, found by what they enclose."""

    def __init__(self, nodes: Iterable[SpanNode]) -> None:
        self._nodes = sorted(filter(_is_finite, nodes), key=lambda node: node.start_s)
        self._starts = [node.start_s for node in self._nodes]
        # The latest end of the first one, of the first two, and so on.
        self._latest = [*accumulate((node.end_s for node in self._nodes), max)]
        # Ends with ranks, in order, of the last (number & -number) of the first `number` spans; and a tree of their durations' halves.
        self._ends: list[list[tuple[float, int]]] = [[]]
        self._least: list[list[float]] = [[]]
        # More than the rounding of two differences of sums of these times, in `closest`.
        self._slack = (
            max((abs(time) for each in self._nodes for time in (each.start_s, each.end_s)), default=0) * 2**-48
        )

    def _build(self) -> None:
        """Builds the trees, for the first span that another one encloses: most have one above them, and are alone at their time."""
        for number in range(1, len(self._nodes) + 1):
            ends = sorted((self._nodes[rank].end_s, rank) for rank in range(number & (number - 1), number))
            # Halves: the whole may be more than a float.
            least = [0.0] * len(ends) + [end / 2 - self._starts[rank] / 2 for end, rank in ends]
            for index in range(len(ends) - 1, 0, -1):
                least[index] = min(least[2 * index], least[2 * index + 1])
            self._ends.append(ends)
            self._least.append(least)

    def closest(self, child: SpanNode) -> dict[int, SpanNode]:
        """Returns those that begin and end the least earlier and later, by id; all with the same sum of both."""
        found: dict[int, SpanNode] = {}
        least = limit = math.inf
        for half, node in self._enclosing(child.start_s, child.end_s) if _is_finite(child) else ():
            if half > limit:
                break
            # In this order: rounding decides between spans.
            longer = node.end_s - child.end_s + child.start_s - node.start_s
            if 0 < longer < least:
                limit = min(limit, half + self._slack)
                least, found = longer, {id(node): node}
            elif longer == least < math.inf:
                found[id(node)] = node
        return found

    def _enclosing(self, start: float, end: float) -> Iterator[tuple[float, SpanNode]]:
        """Yields those that enclose a time and are longer, with halves of their durations, shortest first; some twice."""
        earlier, no_later = bisect_left(self._starts, start), bisect_right(self._starts, start)
        if not ((earlier and self._latest[earlier - 1] >= end) or (no_later and self._latest[no_later - 1] > end)):
            return
        if len(self._ends) <= len(self._nodes):
            self._build()
        heap: list[tuple[float, int, int]] = []
        # Those that begin earlier, then those that end later.
        heap += self._covering(earlier, (end, -1))
        heap += self._covering(no_later, (end, len(self._nodes)))
        heapq.heapify(heap)
        while heap:
            half, number, index = heapq.heappop(heap)
            leaf = index - len(self._ends[number])
            if leaf >= 0:
                yield half, self._nodes[self._ends[number][leaf][1]]
                continue
            for each in (2 * index, 2 * index + 1):
                heapq.heappush(heap, (self._least[number][each], number, each))

    def _covering(self, number: int, after: tuple[float, int]) -> Iterator[tuple[float, int, int]]:
        """Yields the least halves of the parts that hold those of the first spans whose end and rank are behind."""
        while number > 0:
            ends, least = self._ends[number], self._least[number]
            low, high = bisect_right(ends, after) + len(ends), 2 * len(ends)
            while low < high:
                if low & 1:
                    yield least[low], number, low
                    low += 1
                if high & 1:
                    high -= 1
                    yield least[high], number, high
                low, high = low // 2, high // 2
            number &= number - 1


def _is_finite(node: SpanNode) -> bool:
    return math.isfinite(node.start_s) and math.isfinite(node.end_s)
