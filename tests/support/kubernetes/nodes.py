"""The nodes of the tests' cluster, and a scheduler: what is required of a node is required, what is preferred comes first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fulmen_service_kit.kubernetes.documents import quantity

_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED, _PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


def node_document(name: str, *, spec: Mapping[str, Any] | None = None, **allocatable: str) -> dict[str, Any]:
    """Returns a node that is ready."""
    return {
        "metadata": {"name": name, "labels": {_HOSTNAME: name}},
        "spec": dict(spec or {}),
        "status": {
            "allocatable": {key.replace("gpu", "nvidia.com/gpu"): value for key, value in allocatable.items()},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def node_for(pod: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], nodes: Mapping[str, Any]) -> tuple[str, str]:
    """Chooses the node of a pod.

    Args:
        pod: The pod.
        pods: All pods.
        nodes: Documents of the nodes, by name.

    Returns:
        The name of the node, empty if there is none, and then why.
    """
    running = [
        each for each in pods if each["spec"].get("nodeName") and each["status"]["phase"] in ("Pending", "Running")
    ]
    reasons = {name: _problem(pod, node, running) for name, node in nodes.items()}
    able = [name for name, reason in reasons.items() if not reason]
    if not able:
        told = ", ".join(sorted(set(reasons.values())))
        return "", f"0/{len(nodes)} nodes are available: {told}."
    return max(able, key=lambda name: _score(pod, name, running)), ""


def _problem(pod: Mapping[str, Any], node: Mapping[str, Any], running: list[Mapping[str, Any]]) -> str:
    spec, name = pod["spec"], node["metadata"]["name"]
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    if not spec.get("nodeSelector", {}).items() <= node["metadata"]["labels"].items():
        return "node(s) didn't match Pod's node affinity/selector"
    tolerated = {each.get("key") for each in spec.get("tolerations", [])}
    if any(taint["key"] not in tolerated for taint in node["spec"].get("taints", [])):
        return "node(s) had untolerated taint"
    here = [each for each in running if each["spec"]["nodeName"] == name]
    for resource, amount in _requests(pod).items():
        taken = sum(_requests(each).get(resource, 0) for each in here)
        if taken + amount > quantity(node["status"]["allocatable"].get(resource, "0")):
            return f"Insufficient {resource}"
    affinity = spec.get("affinity", {})
    terms = affinity.get("nodeAffinity", {}).get(_REQUIRED, {}).get("nodeSelectorTerms", [])
    if terms and not any(_fits_fields(term["matchFields"], name) for term in terms):
        return "node(s) didn't match Pod's node affinity/selector"
    for term in affinity.get("podAntiAffinity", {}).get(_REQUIRED, []):
        if any(_matches(term, each) for each in here):
            return "node(s) didn't match pod anti-affinity rules"
    for term in affinity.get("podAffinity", {}).get(_REQUIRED, []):
        # The first of a group matches itself.
        if any(_matches(term, each) for each in running) and not any(_matches(term, each) for each in here):
            return "node(s) didn't match pod affinity rules"
    return ""


def _score(pod: Mapping[str, Any], name: str, running: list[Mapping[str, Any]]) -> float:
    here = [each for each in running if each["spec"]["nodeName"] == name]
    preferred = pod["spec"].get("affinity", {}).get("podAffinity", {}).get(_PREFERRED, [])
    score = sum(each["weight"] * any(_matches(each["podAffinityTerm"], other) for other in here) for each in preferred)
    for term in pod["spec"].get("topologySpreadConstraints", []):
        score -= sum(_matches(term, each) for each in here)
    return float(score)


def _fits_fields(wanted: list[Mapping[str, Any]], name: str) -> bool:
    assert all((each["key"], each["operator"]) == ("metadata.name", "NotIn") for each in wanted)
    return all(name not in each["values"] for each in wanted)


def _matches(term: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    assert term["topologyKey"] == _HOSTNAME
    return term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def _requests(pod: Mapping[str, Any]) -> dict[str, float]:
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        for name, value in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            total[name] = total.get(name, 0) + quantity(value)
    return total
