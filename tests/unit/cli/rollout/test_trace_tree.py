"""Spans are shown as a tree, each once, whatever their writers say of their parents."""

from __future__ import annotations

import random

from opentelemetry.proto.trace.v1 import trace_pb2
from rich.tree import Tree

from fulmen_cli.rollout.traces import SpanNode, grow


def grown(links: dict[str, str], starts: dict[str, int] | None = None) -> dict[str, list[str]]:
    """Grows a tree of spans with these parents; returns the names below each, and below the branch itself as ``."""
    spans = [
        trace_pb2.Span(
            span_id=name.encode(),
            parent_span_id=parent.encode(),
            name=name,
            start_time_unix_nano=place if starts is None else starts[name],
        )
        for place, (name, parent) in enumerate(links.items())
    ]
    branch = Tree("")
    grow(branch, [SpanNode(span=span, lines=[]) for span in spans])
    found, waiting = {}, [branch]
    while waiting:
        tree = waiting.pop()
        found[str(tree.label).partition("  ")[0]] = [str(each.label).partition("  ")[0] for each in tree.children]
        waiting += tree.children
    return found


def test_spans_are_below_their_parents_in_order_of_start_and_below_the_branch_without_one() -> None:
    assert grown({"child": "root", "second": "", "root": "unknown", "other": "root"}) == {
        "": ["second", "root"],
        "root": ["child", "other"],
        "second": [],
        "child": [],
        "other": [],
    }


def test_spans_in_a_circle_and_what_is_below_them_are_below_the_branch_and_one_of_itself_is_a_root() -> None:
    found = grown({"a": "b", "b": "a", "below": "b", "own": "own", "leaf": "own"})
    assert sorted(found[""]) == ["a", "b", "below", "own"]
    assert found["own"] == ["leaf"]


def test_a_chain_that_begins_with_its_last_span_is_grown_at_once() -> None:
    count = 50_000
    links = {str(number): str(number - 1) if number else "" for number in range(count)}
    found = grown(links, {name: count - int(name) for name in links})
    assert found == {"": ["0"], **{name: [str(int(name) + 1)] for name in links}, str(count - 1): []}


def test_every_span_is_shown_once_whatever_the_parents() -> None:
    draw = random.Random(3)
    for _ in range(300):
        names = [str(number) for number in range(draw.randrange(1, 12))]
        found = grown({name: draw.choice([*names, "", "unknown"]) for name in names})
        assert sorted(name for below in found.values() for name in below) == sorted(names)
