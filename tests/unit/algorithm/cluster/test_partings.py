"""Of machines that do not reach each other those that miss most are left out, and for a while."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.cluster.partings import FIRST_S, LONGEST_S, LeftOut, left_out

MACHINES = "abcdef"


def pairs(*names: str) -> set[frozenset[str]]:
    return {frozenset(name) for name in names}


@pytest.mark.parametrize(
    ("parted", "processes", "out"),
    [
        (["ab"], {"a": 2, "b": 2}, ["b"]),
        (["ab"], {"a": 1, "b": 2}, ["a"]),
        (["ab", "bc"], {"a": 2, "b": 8, "c": 2}, ["b"]),
        (["ab", "cd"], {"a": 1, "b": 1, "c": 1, "d": 1}, ["d", "b"]),
        ([], {"a": 1, "b": 1}, []),
    ],
    ids=["the last of two alike", "the one with fewer ranks", "the one that misses most", "one of each pair", "none"],
)
def test_who_is_left_out(parted: list[str], processes: dict[str, int], out: list[str]) -> None:
    assert left_out(pairs(*parted), processes) == out


@given(st.sets(st.sampled_from([frozenset(pair) for pair in combinations(MACHINES, 2)])))
def test_all_that_are_left_reach_each_other_and_whoever_reaches_all_is_left(parted: set[frozenset[str]]) -> None:
    out = set(left_out(parted, dict.fromkeys(MACHINES, 1)))
    assert all(pair & out for pair in parted)
    assert out <= {machine for pair in parted for machine in pair}


def test_a_node_that_was_left_out_is_used_again_later_each_time() -> None:
    now_s = 0.0
    nodes = LeftOut(clock=lambda: now_s)
    nodes.add("a")
    assert nodes.names == {"a"}
    now_s = FIRST_S
    assert nodes.names == set()
    nodes.add("a")
    now_s += 2 * FIRST_S - 1
    assert nodes.names == {"a"}
    for _ in range(20):
        nodes.add("a")
    now_s += LONGEST_S
    assert nodes.names == set()
    now_s += LONGEST_S
    # What is long past is forgotten.
    assert nodes.names == set()
    nodes.add("a")
    now_s += FIRST_S
    assert nodes.names == set()
