"""Decides from a Job and its pod whether the attempt has ended, and why it failed.

Invariant: a pure function of the documents and times.
Sources: the Kubernetes API reference (Pod v1 `status`, Job batch/v1 `status`), "Pod disruption conditions".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulmen_runner.agents.kubernetes.template import AGENT_CONTAINER
from fulmen_service_kit.kubernetes.documents import (
    CONFIGURATION_WAITS,
    HOPELESS_WAITS,
    IMAGE_WAITS,
    condition_of,
    disruption_of,
    reason_of,
    waiting_of,
)

_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
_NO_SUCH_IMAGE = ("not found", "denied", "unauthorized", "manifest unknown", "does not exist", "invalid reference")
_OWN_EVICTION = ("exceeds", "ephemeral local storage")
_OUT_OF_MEMORY, _DEADLINE = "OOMKilled", "DeadlineExceeded"
_SIGNALLED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Timeouts for starting a pod, in seconds: for scheduling, and for pulling images."""

    start_s: float
    image_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The agent exited, successfully if `problem` is empty; its log is in the pod."""

    pod: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The agent never ran because of its template; there is no log."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineExceeded:
    """The Job's own deadline passed."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The cluster ended the Job; INFRA."""

    message: str


Verdict = Ended | Refused | DeadlineExceeded | Lost


def verdict_of(
    job: Mapping[str, Any] | None, pods: Sequence[Mapping[str, Any]], *, waited_s: float, patience: Patience
) -> Verdict | None:
    """Returns the verdict on an attempt; None while it is running.

    Args:
        job: The Job; None if it was deleted.
        pods: Its pods.
        waited_s: Time since the waiting reason last changed, in seconds.
        patience: Limits of that time.
    """
    if job is None:
        return Lost(message="Job was deleted by someone else")
    failure = condition_of(job, "Failed")
    if failure.get("reason") == _DEADLINE:
        return DeadlineExceeded(message=f"Job deadline of {job['spec'].get('activeDeadlineSeconds')} s exceeded")
    if not pods:
        if failure:
            return Lost(message=f"pod was deleted: {reason_of(failure)}")
        if waited_s > patience.start_s:
            return Lost(
                message=f"cluster created no pod within {patience.start_s:g} s. Check quotas and admission policies."
            )
        return None
    pod = max(pods, key=lambda each: each["metadata"].get("creationTimestamp") or "")
    return _pod_verdict(pod, waited_s=waited_s, patience=patience)


def waiting_for(pods: Sequence[Mapping[str, Any]]) -> str:
    """Returns a key for what the pods are waiting for; the wait restarts when it changes."""
    return " ".join(
        f"{pod['metadata']['name']}:{pod.get('status', {}).get('phase')}:{(reason in IMAGE_WAITS and 'image') or reason}"
        for pod in pods
        for reason in [waiting_of(pod).get("reason", "")]
    )


def _pod_verdict(pod: Mapping[str, Any], *, waited_s: float, patience: Patience) -> Verdict | None:
    status = pod.get("status", {})
    name = pod["metadata"]["name"]
    evicted = _eviction(pod)
    if evicted is not None:
        return evicted if isinstance(evicted, Lost) else Ended(pod=name, problem=evicted.message)
    terminated = _agent_state(pod).get("terminated")
    if terminated:
        return Ended(pod=name, problem=_problem(terminated, pod))
    if status.get("phase") == "Failed":
        return Lost(message=f"pod failed: {reason_of(status)}")
    if pod["metadata"].get("deletionTimestamp"):
        return Lost(message="pod is being deleted, by someone else or with its node")
    return _waiting_verdict(pod, waited_s=waited_s, patience=patience)


def _waiting_verdict(pod: Mapping[str, Any], *, waited_s: float, patience: Patience) -> Verdict | None:
    waiting = waiting_of(pod)
    reason, text = waiting.get("reason", ""), reason_of(waiting)
    if reason in HOPELESS_WAITS:
        return Refused(message=f"image of a container cannot be pulled: {text}")
    if reason in IMAGE_WAITS and waited_s > patience.image_s:
        message = f"image of a container was not pulled within {patience.image_s:g} s: {text}"
        absent = any(word in text.lower() for word in _NO_SUCH_IMAGE)
        return Refused(message=message) if absent else Lost(message=message)
    if reason in CONFIGURATION_WAITS and waited_s > patience.image_s:
        return Refused(message=f"container cannot be created: {text}")
    unscheduled = condition_of(pod, "PodScheduled", value="False")
    if unscheduled and waited_s > patience.start_s:
        return Lost(message=f"pod was not scheduled within {patience.start_s:g} s: {reason_of(unscheduled)}")
    return None


def _eviction(pod: Mapping[str, Any]) -> Lost | Refused | None:
    """Returns the verdict if the cluster evicted the pod; Refused if the agent's own disk usage was the cause."""
    text, reason = disruption_of(pod), pod.get("status", {}).get("reason")
    if not text or reason == _DEADLINE:
        return None
    if reason == "Evicted" and any(word in text for word in _OWN_EVICTION):
        return Refused(message=f"pod exceeded its limits and was evicted: {text}")
    return Lost(message=f"cluster ended the pod: {text}")


def _problem(terminated: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
    code = terminated.get("exitCode", 0)
    reason = terminated.get("reason", "")
    if reason == _OUT_OF_MEMORY:
        limit = (
            _agent_of(pod.get("spec", {}).get("containers", [])).get("resources", {}).get("limits", {}).get("memory")
        )
        return f"container exceeded its memory limit of {limit} and was killed"
    if reason in _NOT_STARTED:
        return f"container cannot be started: {terminated.get('message', reason)}"
    if code > _SIGNALLED:
        return f"container was killed by signal {code - _SIGNALLED}"
    return f"container exited with status {code}" if code else ""


def _agent_state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return _agent_of(pod.get("status", {}).get("containerStatuses") or []).get("state", {})


def _agent_of(containers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(containers) == 1:
        return containers[0]
    return next((each for each in containers if each.get("name") == AGENT_CONTAINER), {})
