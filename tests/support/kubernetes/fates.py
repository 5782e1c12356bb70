"""What a cluster does to pods beside running them, chosen by their image."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    """What becomes of a pod with this image; any other image runs."""

    NO_SUCH_IMAGE = "fate/no-such-image:1"
    NO_REGISTRY = "fate/no-registry:1"
    BAD_NAME = "fate/BAD NAME"
    NO_NODE = "fate/no-node:1"
    NO_POD = "fate/no-pod:1"
    OUT_OF_MEMORY = "fate/out-of-memory:1"
    EVICTED = "fate/evicted:1"
    PREEMPTED = "fate/preempted:1"
    NODE_LOST = "fate/node-lost:1"
    CANNOT_START = "fate/cannot-start:1"


_WAITING = {
    Fate.NO_SUCH_IMAGE: ("ImagePullBackOff", "rpc error: code = NotFound: fate/no-such-image:1: not found"),
    Fate.NO_REGISTRY: ("ErrImagePull", "dial tcp 192.0.2.1:443: i/o timeout"),
    Fate.BAD_NAME: ("InvalidImageName", "couldn't parse image reference"),
}
_TERMINATED = {
    Fate.OUT_OF_MEMORY: {"exitCode": 137, "reason": "OOMKilled"},
    Fate.CANNOT_START: {"exitCode": 128, "reason": "StartError", "message": "exec: no-such-program: not found"},
}
_DISRUPTED = {
    Fate.PREEMPTED: {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "for another",
    },
    Fate.NODE_LOST: {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "the node",
    },
}
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}


def unscheduled(message: str) -> dict[str, Any]:
    """Returns the status of a pod for which there is no node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def status_of(container: str, state: dict[str, Any], phase: str = "Pending") -> dict[str, Any]:
    """Returns the status of a pod by the state of its container."""
    return {"phase": phase, "containerStatuses": [{"name": container, "state": state}]}


def fated(image: str, container: str) -> dict[str, Any] | None:
    """Returns the status that a pod's image decides; None if it runs."""
    if image == Fate.NO_NODE:
        return unscheduled("0/3 nodes: no memory")
    if image == Fate.EVICTED:
        return dict(EVICTED)
    if image in _WAITING:
        reason, message = _WAITING[Fate(image)]
        return status_of(container, {"waiting": {"reason": reason, "message": message}})
    if image in _TERMINATED:
        return status_of(container, {"terminated": _TERMINATED[Fate(image)]}, "Failed")
    if image in _DISRUPTED:
        status = status_of(container, {"terminated": {"exitCode": 143, "reason": "Error"}}, "Failed")
        return {**status, "conditions": [_DISRUPTED[Fate(image)]]}
    return None
