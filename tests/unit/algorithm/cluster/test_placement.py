"""A plan uses nodes as the affinity says, never beyond what they have, and is refused only where none can exist."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.cluster.placement import planned, planned_together, room_of
from fulmen_algorithm.cluster.port import Affinity, GroupOrder, Node, PlacementRefused, Resources, Wishes

GIB = 2**30


def node(name: str, cpus: int, gpus: int = 0) -> Node:
    return Node(name=name, has=Resources(cpus=cpus, gpus=gpus, memory_bytes=64 * GIB))


def order(count: int, affinity: Affinity, **each: int) -> GroupOrder:
    return GroupOrder(module="any", count=count, wishes=Wishes(each=Resources(**each), affinity=affinity))


NODES = [node("a", 4), node("b", 8), node("c", 4)]


@pytest.mark.parametrize(
    ("affinity", "plan"),
    [
        (Affinity.PACK, [("b", 4)]),
        (Affinity.SPREAD, [("a", 2), ("b", 1), ("c", 1)]),
        (Affinity.ONE_NODE, [("b", 4)]),
    ],
)
def test_four_processes_of_two_cpus_go_where_the_affinity_says(affinity, plan):
    assert planned(order(4, affinity, cpus=2), NODES) == plan


def test_a_node_gets_no_more_processes_than_it_takes():
    nodes = [replace(each, most=2) for each in NODES]
    assert planned(order(4, Affinity.PACK), nodes) == [("a", 2), ("b", 2)]
    with pytest.raises(PlacementRefused, match="the nodes can take 6 processes of 7"):
        planned(order(7, Affinity.PACK), nodes)


def test_processes_of_a_pod_are_placed_as_one():
    pods = order(6, Affinity.PACK, cpus=2)
    pods = replace(pods, wishes=replace(pods.wishes, together=3))
    nodes = [node("a", 10), node("b", 8)]
    # Five and four of them fit one by one.
    assert planned_together([pods], nodes) == "6 processes in 2 pods: 3 on a, 3 on b"
    assert room_of(replace(pods, count=9), nodes) == 6
    with pytest.raises(PlacementRefused, match=r"the nodes can take 6 processes of 9 in pods of 3"):
        planned(replace(pods, count=9), nodes)
    with pytest.raises(PlacementRefused, match="a pod of 3 processes asks for 6 CPUs, but the largest node has 4"):
        planned(pods, NODES[::2])


def test_nodes_that_are_not_to_be_used_are_left_alone():
    asked = order(2, Affinity.PACK, cpus=2)
    assert planned(replace(asked, wishes=replace(asked.wishes, without=["b"])), NODES) == [("a", 2)]
    assert room_of(order(8, Affinity.PACK, cpus=2), NODES, without=["b", "c"]) == 2


def test_each_on_a_node_of_its_own():
    assert planned(order(3, Affinity.OWN_NODES, cpus=4), NODES) == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize(
    ("asked", "reasons"),
    [
        (order(9, Affinity.PACK, cpus=2), ["9 processes ask for 18 CPUs, but the nodes have 16 together"]),
        (
            order(2, Affinity.PACK, cpus=9, gpus=1),
            [
                "a process asks for 9 CPUs, but the largest node has 8",
                "a process asks for 1 GPUs, but the largest node has 0",
            ],
        ),
        (order(3, Affinity.PACK, cpus=5), ["the nodes can take 1 process of 3"]),
        (
            order(4, Affinity.OWN_NODES, cpus=1),
            ["4 nodes are requested (own_nodes), but only 3 can take a process"],
        ),
        (
            order(5, Affinity.ONE_NODE, cpus=2),
            ["one node is requested (one_node), but none can take more than 4 processes"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_every_reason(asked, reasons):
    with pytest.raises(PlacementRefused) as refused:
        planned(asked, NODES)
    assert list(refused.value.reasons) == reasons


def test_what_a_node_does_not_tell_is_not_held_against_it():
    unknown = Node(name="this machine", has=Resources(cpus=2, gpus=None, memory_bytes=None))
    assert planned(order(2, Affinity.PACK, cpus=1, gpus=8), [unknown]) == [("this machine", 2)]


def test_groups_of_one_run_are_planned_beside_each_other():
    ranks, engines = order(2, Affinity.OWN_NODES, cpus=4), order(4, Affinity.PACK, cpus=2)
    assert planned_together([ranks, engines], NODES) == "2 processes: 1 on a, 1 on b; 4 processes: 2 on b, 2 on c"
    with pytest.raises(PlacementRefused) as refused:
        planned_together([ranks, order(5, Affinity.PACK, cpus=2)], NODES)
    assert list(refused.value.reasons) == [
        "5 processes ask for 10 CPUs, but the nodes have 8 together beside the 2 processes before"
    ]
    with pytest.raises(PlacementRefused) as refused:
        planned_together([order(2, Affinity.PACK, cpus=99), order(1, Affinity.PACK, cpus=98)], NODES)
    assert [reason.partition(",")[0] for reason in refused.value.reasons] == [
        "a process asks for 99 CPUs",
        "a process asks for 98 CPUs",
    ]


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from(list(Affinity)),
)
def test_a_plan_holds_what_it_promises(sizes, count, cpus, affinity):
    nodes = [node(f"node-{index}", size) for index, size in enumerate(sizes)]
    room = [size // cpus for size in sizes]
    most = {
        Affinity.ONE_NODE: max(room),
        Affinity.OWN_NODES: sum(map(bool, room)),
    }.get(affinity, sum(room))
    asked = order(count, affinity, cpus=cpus)
    assert room_of(asked, nodes) == min(count, most)
    if count > most:
        with pytest.raises(PlacementRefused) as refused:
            planned(asked, nodes)
        assert refused.value.reasons
        return
    plan = dict(planned(asked, nodes))
    assert sum(plan.values()) == count
    assert all(used * cpus <= sizes[int(name.removeprefix("node-"))] for name, used in plan.items())
    if affinity is Affinity.ONE_NODE:
        assert len(plan) == 1
    if affinity is Affinity.OWN_NODES:
        assert set(plan.values()) == {1}
    if affinity is Affinity.SPREAD:
        assert len(plan) == min(count, sum(map(bool, room)))
    if affinity is Affinity.PACK and count <= max(room):
        assert len(plan) == 1
