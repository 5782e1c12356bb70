"""The free resources of nodes, from the documents of the nodes and of the pods that stay on them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fulmen_algorithm.cluster.port import Node, Resources
from fulmen_algorithm.cluster.settings import KubernetesSettings, Toleration
from fulmen_service_kit.kubernetes.documents import quantity

_KEEPING_OFF = frozenset({"NoSchedule", "NoExecute"})
_PASSING = "node.kubernetes.io/"
"""Prefix of the taints of temporary states, such as a node that is not ready."""


def usable_nodes(nodes: Iterable[Mapping[str, Any]], settings: KubernetesSettings) -> list[Mapping[str, Any]]:
    """Returns the nodes that could take a pod. One that is not ready or is cordoned now may be later."""
    return [node for node in nodes if _is_usable(node, settings)]


def room_of(
    nodes: Iterable[Mapping[str, Any]], requested: Mapping[str, Mapping[str, float]], settings: KubernetesSettings
) -> list[Node]:
    """Returns what nodes have besides what is requested on them, by the nodes' names."""
    return [_room(node, requested.get(node["metadata"]["name"], {}), settings.gpu_resource) for node in nodes]


def requests_of(pod: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns what a pod requests, by resource.

    Source: the documentation of Kubernetes, "Init Containers" and "Sidecar Containers", "Resource sharing within containers".
    """
    spec = pod["spec"]
    lasting: Mapping[str, float] = {}
    highest: Mapping[str, float] = {}
    for container in spec.get("initContainers") or []:
        while_it_runs = added(lasting, _requests(container))
        if container.get("restartPolicy") == "Always":
            lasting = while_it_runs
        highest = _joined(max, highest, while_it_runs)
    for container in spec["containers"]:
        lasting = added(lasting, _requests(container))
    overhead = {name: quantity(value) for name, value in (spec.get("overhead") or {}).items()}
    return added(_joined(max, highest, lasting), overhead)


def added(first: Mapping[str, float], second: Mapping[str, float]) -> Mapping[str, float]:
    """Returns the sum of amounts, by resource."""
    return _joined(lambda one, other: one + other, first, second)


def _joined(
    how: Callable[[float, float], float], first: Mapping[str, float], second: Mapping[str, float]
) -> Mapping[str, float]:
    return {name: how(first.get(name, 0.0), second.get(name, 0.0)) for name in first.keys() | second.keys()}


def _room(node: Mapping[str, Any], requested: Mapping[str, float], gpu_resource: str) -> Node:
    allocatable = node["status"].get("allocatable") or {}

    def free(name: str) -> int:
        return max(0, int(quantity(allocatable.get(name, "0")) - requested.get(name, 0)))

    has = Resources(cpus=free("cpu"), gpus=free(gpu_resource), memory_bytes=free("memory"))
    return Node(name=node["metadata"]["name"], has=has)


def _is_usable(node: Mapping[str, Any], settings: KubernetesSettings) -> bool:
    taints, labels = (node.get("spec") or {}).get("taints") or [], node["metadata"].get("labels") or {}
    return settings.node_selector.items() <= labels.items() and all(
        _is_tolerated(taint, settings.tolerations) for taint in taints
    )


def _is_tolerated(taint: Mapping[str, Any], tolerations: Sequence[Toleration]) -> bool:
    if taint["effect"] not in _KEEPING_OFF or taint["key"].startswith(_PASSING):
        return True
    return any(
        each.effect in ("", taint["effect"])
        # Without a key it tolerates every taint.
        and (each.key == taint["key"] or (not each.key and each.operator == "Exists"))
        and (each.operator == "Exists" or each.value == taint.get("value", ""))
        for each in tolerations
    )


def _requests(container: Mapping[str, Any]) -> Mapping[str, float]:
    requests = (container.get("resources") or {}).get("requests") or {}
    return {name: quantity(value) for name, value in requests.items()}
