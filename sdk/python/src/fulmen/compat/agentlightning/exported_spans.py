"""Spans that Agent Lightning's store exported, as a tree.

Source: `agentlightning/types/tracer.py` (the records) and `agentlightning/adapter/triplet.py` (`TraceTree`) of version 0.3.0. The
tree is theirs, repaired as theirs, so that the same calls and rewards are found in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulmen.compat.agentlightning.enclosing import move_below_enclosing

__all__ = ["ExportedSpan", "SpanNode", "SpansInvalid", "read_spans", "span_tree"]


MAX_REPORTED = 50


class SpansInvalid(ValueError):
    """The spans are not an export of Agent Lightning's, or form no tree."""


_NO_TREE = "These spans form no tree:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSpan:
    """One span.

    Attributes:
        span_id: Its id, hexadecimal.
        parent_id: Id of its parent, or None.
        name: Its name.
        start_s: Start, seconds since the epoch.
        end_s: End, seconds since the epoch.
        attributes: Its attributes.
        sequence_id: Its place in the rollout, as the store counted it.
        rollout_id: Their id of the rollout.
        attempt_id: Their id of the attempt.
    """

    span_id: str
    parent_id: str | None
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Any] = field(repr=False)
    sequence_id: int = 0
    rollout_id: str = ""
    attempt_id: str = ""


def read_spans(source: str | Path | Iterable[Any]) -> list[ExportedSpan]:
    """Returns spans of a file with one JSON object a line, or of records (theirs, or as dictionaries).

    Raises:
        SpansInvalid: If a record lacks a field of theirs; names all of them.
        OSError: If the file cannot be read.
    """
    records: Iterable[Any] = source if not isinstance(source, str | Path) else _lines(Path(source))
    spans, problems = [], []
    for number, record in enumerate(records, start=1):
        if isinstance(record, ExportedSpan):
            spans.append(record)
            continue
        try:
            given = json.loads(record) if isinstance(record, str) else record
            spans.append(_span(given if isinstance(given, Mapping) else given.model_dump()))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            problems.append(f"span {number}: {type(error).__name__}: {str(error)[:200]}")
    _refuse("These are not spans of Agent Lightning:", problems)
    return spans


def _refuse(title: str, problems: list[str]) -> None:
    """Raises SpansInvalid if there are problems; names the first ones."""
    if not problems:
        return
    more = len(problems) - MAX_REPORTED
    rest = [f"{more} more are not listed"] if more > 0 else []
    raise SpansInvalid("\n".join([title, *problems[:MAX_REPORTED], *rest]))


def _lines(path: Path) -> Iterator[str]:
    return filter(str.strip, path.read_text(encoding="utf-8", errors="replace").splitlines())


def _span(record: Mapping[str, Any]) -> ExportedSpan:
    return ExportedSpan(
        span_id=str(record["span_id"]),
        parent_id=None if record["parent_id"] is None else str(record["parent_id"]),
        name=str(record["name"]),
        start_s=float(record["start_time"]),
        end_s=float(record["end_time"]),
        attributes=dict(record["attributes"]),
        sequence_id=int(record.get("sequence_id", 0)),
        rollout_id=str(record.get("rollout_id", "")),
        attempt_id=str(record.get("attempt_id", "")),
    )


@dataclass(slots=True, kw_only=True)
class SpanNode:
    """A span, or the place of one that was not exported, with what is below it."""

    span_id: str
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    children: list[SpanNode] = field(default_factory=list)

    def walk(self) -> Iterator[SpanNode]:
        """Yields it and all below it, parents first.

        Raises:
            SpansInvalid: If it comes to one that it has yielded, since several ways lead there, or one in a circle; names it.
        """
        # The nodes themselves: an id may be given again to a node that is made meanwhile.
        met: dict[int, SpanNode] = {}
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if id(node) in met:
                _refuse(_NO_TREE, [f"The span {node.span_id[:64]} is below itself, or below two spans."])
            met[id(node)] = node
            yield node
            waiting += reversed(node.children)

    def repair(self) -> None:
        """Moves spans at the top below the closest span that encloses them in time.

        Instrumentation of different frameworks does not always know its parent. Chains of single spans at the top are skipped. A
        span that one below it encloses stays where it is; theirs would lose it with all below it.

        Raises:
            SpansInvalid: As `walk`.
        """
        move_below_enclosing(next(node for node in self.walk() if len(node.children) != 1))


def span_tree(spans: Sequence[ExportedSpan]) -> SpanNode:
    """Returns the tree of the spans of one attempt; several roots get one above them.

    Raises:
        SpansInvalid: If there are no spans, or some occur twice, or are below themselves; names those.
    """
    if not spans:
        raise SpansInvalid("There are no spans.")
    below: dict[str, list[str]] = {}
    parents = _parents(spans)
    for span in spans:
        if span.parent_id is not None:
            below.setdefault(span.parent_id, []).append(span.span_id)
    roots = [span.span_id for span in spans if span.parent_id is None]
    roots += [parent for parent in below if parent not in parents]
    made = {
        span.span_id: SpanNode(
            span_id=span.span_id, name=span.name, start_s=span.start_s, end_s=span.end_s, attributes=span.attributes
        )
        for span in spans
    }
    for parent, children in below.items():
        nodes = [made[each] for each in children]
        if parent not in made:
            start, end = min(each.start_s for each in nodes), max(each.end_s for each in nodes)
            made[parent] = SpanNode(span_id=parent, name="", start_s=start, end_s=end)
        made[parent].children = nodes
    nodes = [made[root] for root in roots]
    reached = {node.span_id for root in nodes for node in root.walk()}
    lost = [span.span_id for span in spans if span.span_id not in reached]
    _refuse(_NO_TREE, [f"The span {each[:64]} is below itself, or below one that is." for each in lost])
    if len(nodes) == 1:
        return nodes[0]
    return SpanNode(
        span_id="virtual-root", name="virtual-root", start_s=nodes[0].start_s, end_s=nodes[-1].end_s, children=nodes
    )


def _parents(spans: Sequence[ExportedSpan]) -> dict[str, str | None]:
    """Returns the parent of each span.

    Their store holds a span once in an attempt. With one that occurs twice, several ways would lead to what is below it: as many
    as 2**n below n of them, and after a repair without an end.
    """
    parents: dict[str, str | None] = {}
    twice: dict[str, str] = {}
    for span in spans:
        if span.span_id not in parents:
            parents[span.span_id] = span.parent_id
        elif parents[span.span_id] != span.parent_id:
            twice[span.span_id] = ", below different spans"
        else:
            twice.setdefault(span.span_id, "")
    _refuse(_NO_TREE, [f"The span {each[:64]} occurs twice{how}." for each, how in twice.items()])
    return parents
