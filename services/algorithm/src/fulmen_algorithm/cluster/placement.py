"""Plans where the processes of a group run. An engine that places them itself may choose other nodes with room."""

from collections.abc import Collection, Sequence
from dataclasses import fields, replace

from fulmen_algorithm.cluster.port import Affinity, GroupOrder, Node, PlacementRefused, Resources

_NAMES = {"cpus": "CPUs", "gpus": "GPUs", "memory_bytes": "bytes of memory"}


def planned(order: GroupOrder, nodes: Sequence[Node]) -> list[tuple[str, int]]:
    """Distributes a group over nodes.

    Returns:
        Names of the nodes that are used, with the number of processes of each.

    Raises:
        PlacementRefused: with every reason, if it does not fit.
    """
    nodes = [node for node in nodes if node.name not in order.wishes.without]
    wishes, room = order.wishes, _rooms(order, nodes)
    if wishes.affinity is Affinity.ONE_NODE:
        room = {name: count for name, count in room.items() if count >= order.count}
    if sum(room.values()) < order.count:
        raise PlacementRefused(_reasons(order, nodes))
    shares = dict.fromkeys(room, 0)
    for _ in range(0, order.count, _together(order)):
        free = [name for name in shares if shares[name] < room[name]]
        if wishes.affinity is Affinity.SPREAD:
            shares[min(free, key=lambda name: shares[name])] += _together(order)
        else:
            # The node with the most room first, until it is full.
            shares[max(free, key=lambda name: (shares[name] > 0, room[name]))] += _together(order)
    return [(name, count) for name, count in shares.items() if count]


def planned_together(orders: Sequence[GroupOrder], nodes: Sequence[Node]) -> str:
    """Distributes groups over nodes, each beside those before it; returns the distributions as text.

    Raises:
        PlacementRefused: with every reason of each group that does not fit beside those that do.
    """
    texts: list[str] = []
    reasons: list[str] = []
    placed = 0
    for order in orders:
        try:
            shares = planned(order, nodes)
        except PlacementRefused as error:
            beside = f" beside the {_processes(placed)} before" if placed else ""
            reasons += [f"{reason}{beside}" for reason in error.reasons]
            continue
        placed += order.count
        texts.append(shown(order, shares))
        nodes = [replace(node, has=_left(node, dict(shares).get(node.name, 0), order.wishes.each)) for node in nodes]
    if reasons:
        raise PlacementRefused(dict.fromkeys(reasons))
    return "; ".join(texts)


def _left(node: Node, count: int, each: Resources) -> Resources:
    """Returns what a node has beside so many processes."""
    left = {}
    for kind in _NAMES:
        there = getattr(node.has, kind)
        left[kind] = None if there is None else there - count * (getattr(each, kind) or 0)
    return Resources(**left)


def room_of(order: GroupOrder, nodes: Sequence[Node], *, without: Collection[str] = ()) -> int:
    """Returns how many processes of a group fit some nodes, at most all; nodes of some names do not count."""
    counts = _rooms(order, [node for node in nodes if node.name not in without]).values()
    fit = max(counts, default=0) if order.wishes.affinity is Affinity.ONE_NODE else sum(counts)
    return min(fit, order.count)


def shown(order: GroupOrder, shares: Sequence[tuple[str, int]]) -> str:
    """Returns a distribution as text."""
    pods = f" in {order.count // _together(order)} pods" if _together(order) > 1 else ""
    return f"{_processes(order.count)}{pods}: " + ", ".join(f"{count} on {name}" for name, count in shares)


def _together(order: GroupOrder) -> int:
    return max(1, order.wishes.together)


def _rooms(order: GroupOrder, nodes: Sequence[Node]) -> dict[str, int]:
    """Returns how many processes of a group fit each node."""
    most = 1 if order.wishes.affinity is Affinity.OWN_NODES else order.count
    return {node.name: _room(order, node, most) for node in nodes}


def _room(order: GroupOrder, node: Node, most: int) -> int:
    """Returns how many processes fit a node."""
    each = order.wishes.each
    counts = [most if node.most is None else min(most, node.most)]
    for kind in _NAMES:
        wanted, there = getattr(each, kind), getattr(node.has, kind)
        if wanted and there is not None:
            counts.append(there // wanted)
    return min(counts) // _together(order) * _together(order)


def _reasons(order: GroupOrder, nodes: Sequence[Node]) -> list[str]:
    if not nodes:
        return ["the cluster has no nodes"]
    each, together, reasons = order.wishes.each, _together(order), []
    one = "a process" if together == 1 else f"a pod of {together} processes"
    for kind in (field.name for field in fields(Resources)):
        wanted, have = getattr(each, kind), [getattr(node.has, kind) for node in nodes]
        if not wanted or None in have:
            continue
        if wanted * together > max(have):
            asked = f"{one} asks for {wanted * together} {_NAMES[kind]}"
            reasons.append(f"{asked}, but the largest node has {max(have)}")
        elif wanted * order.count > sum(have):
            asked = f"{_processes(order.count)} ask for {wanted * order.count} {_NAMES[kind]}"
            reasons.append(f"{asked}, but the nodes have {sum(have)} together")
    if order.wishes.affinity is Affinity.OWN_NODES:
        able = sum(_room(order, node, 1) for node in nodes)
        if able < order.count:
            reasons.append(f"{order.count} nodes are requested (own_nodes), but only {able} can take a process")
    if order.wishes.affinity is Affinity.ONE_NODE:
        most = max(_room(order, node, order.count) for node in nodes)
        if most < order.count:
            reasons.append(f"one node is requested (one_node), but none can take more than {_processes(most)}")
    most = sum(_room(order, node, order.count) for node in nodes)
    pods = f" in pods of {together}" if together > 1 else ""
    return reasons or [f"the nodes can take {_processes(most)} of {order.count}{pods}"]


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
