"""Why the pods of a group cannot run, or have ended, from their documents.

Invariant: functions of documents and times alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulmen_algorithm.cluster.local import exit_text
from fulmen_algorithm.cluster.settings import KubernetesSettings
from fulmen_service_kit.kubernetes.documents import (
    CONFIGURATION_WAITS,
    HOPELESS_WAITS,
    condition_of,
    disruption_of,
    reason_of,
    waiting_of,
)

_NODE, _IMAGE, _PODS = "node", "image", "pods"
_SIGNALLED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a group cannot run.

    Attributes:
        text: What happened.
        pod: A pod whose log may have details; empty if there is none.
    """

    text: str
    pod: str = ""


class Watch:
    """Judges the documents of a group each time that they are read."""

    def __init__(self, name: str, settings: KubernetesSettings) -> None:
        """Watches the Job of a name."""
        self._name = name
        self._settings = settings
        self._since: dict[tuple[str, str], float] = {}

    @property
    def shortest_s(self) -> float:
        """The shortest time that pods may wait for something, in seconds."""
        return min(self._settings.schedule_s, self._settings.image_s)

    def failure(self, job: Mapping[str, Any] | None, pods: Sequence[Mapping[str, Any]], now_s: float) -> Failure | None:
        """Returns why the group cannot run; None while it can, or may later.

        Args:
            job: The Job; None if it does not exist.
            pods: Its pods.
            now_s: Time of a monotonic clock, in seconds.
        """
        if job is None:
            return Failure(text=f"Job {self._name} was deleted by someone else")
        # When a Job has ended, the cluster deletes what is left of it: the cause is reported, not the consequences.
        for judged in (_end_of, _leaving):
            for pod in pods:
                if (ended := judged(pod)) is not None:
                    return ended
        for kind in ("Failed", "Complete"):
            if condition := condition_of(job, kind):
                return Failure(text=f"Job {self._name} has ended: {reason_of(condition)}")
        waits = {wait: self._since.get(wait, now_s) for wait in self._waits(job, pods)}
        self._since = waits
        hopeless = next((pod for pod in pods if waiting_of(pod).get("reason") in HOPELESS_WAITS), None)
        if hopeless is not None:
            return Failure(text=f"the image of {_named(hopeless)} cannot be pulled: {reason_of(waiting_of(hopeless))}")
        for (waiting, what), since in waits.items():
            limit_s = self._settings.image_s if what == _IMAGE else self._settings.schedule_s
            if now_s - since > limit_s:
                return Failure(text=self._overdue(waiting, what, pods, limit_s))
        return None

    def _waits(self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, str]]:
        waits = [(pod["metadata"]["name"], _NODE) for pod in pods if condition_of(pod, "PodScheduled", value="False")]
        waits += [(pod["metadata"]["name"], _IMAGE) for pod in pods if waiting_of(pod)]
        # A Job that is suspended waits in a queue.
        if not job["spec"].get("suspend") and len(pods) < job["spec"]["parallelism"]:
            waits.append(("", _PODS))
        return waits

    def _overdue(self, name: str, what: str, pods: Sequence[Mapping[str, Any]], limit_s: float) -> str:
        if what == _PODS:
            return (
                f"the cluster made {len(pods)} pods of Job {self._name} within {limit_s:g} s; check quotas and admission"
                " policies"
            )
        pod = next(each for each in pods if each["metadata"]["name"] == name)
        if what == _NODE:
            reason = reason_of(condition_of(pod, "PodScheduled", value="False"))
            return f"{_named(pod)} got no node within {limit_s:g} s: {reason}"
        waiting = waiting_of(pod)
        done = "made" if waiting["reason"] in CONFIGURATION_WAITS else "given its image"
        return f"the container of {_named(pod)} was not {done} within {limit_s:g} s: {reason_of(waiting)}"


def _end_of(pod: Mapping[str, Any]) -> Failure | None:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if disruption := disruption_of(pod):
        return Failure(text=f"the cluster ended {_named(pod)}: {disruption}")
    states = [each.get("state", {}) for each in status.get("containerStatuses") or []]
    ended = next((state["terminated"] for state in states if state.get("terminated")), None)
    if ended is not None:
        code = int(ended.get("exitCode", 0))
        text = exit_text(_SIGNALLED - code if code > _SIGNALLED else code)
        reason = ended.get("reason", "")
        told = "" if reason in ("", "Error", "Completed") else f" ({reason_of(ended)})"
        return Failure(text=f"{_named(pod)} {text}{told}", pod=name)
    if status.get("phase") == "Failed":
        return Failure(text=f"{_named(pod)} failed: {reason_of(status)}")
    return None


def _leaving(pod: Mapping[str, Any]) -> Failure | None:
    if pod["metadata"].get("deletionTimestamp"):
        return Failure(text=f"{_named(pod)} is being deleted, by someone else or with its node")
    return None


def _named(pod: Mapping[str, Any]) -> str:
    node = pod.get("spec", {}).get("nodeName", "")
    return f"pod {pod['metadata']['name']}" + (f" on {node}" if node else "")
