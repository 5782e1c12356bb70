"""Decides from a Job and its pod whether the attempt has ended, and why it failed.

Invariant: a pure function of the documents and times.
Sources: the Kubernetes API reference (Pod v1 `status`, Job batch/v1 `status`), "Pod disruption conditions".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulmen_runner.agents.kubernetes.template import AGENT_CONTAINER

_IMAGE_WAITS = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_HOPELESS_WAITS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_CONFIGURATION_WAITS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
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
    failure = _condition(job, "Failed")
    if failure.get("reason") == _DEADLINE:
        return DeadlineExceeded(message=f"Job deadline of {job['spec'].get('activeDeadlineSeconds')} s exceeded")
    if not pods:
        if failure:
            return Lost(message=f"pod was deleted: {_reason(failure)}")
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
        f"{pod['metadata']['name']}:{pod.get('status', {}).get('phase')}:{(reason in _IMAGE_WAITS and 'image') or reason}"
        for pod in pods
        for reason in [_waiting(pod).get("reason", "")]
    )


def _pod_verdict(pod: Mapping[str, Any], *, waited_s: float, patience: Patience) -> Verdict | None:
    status = pod.get("status", {})
    name = pod["metadata"]["name"]
    evicted = _eviction(status)
    if evicted is not None:
        return evicted if isinstance(evicted, Lost) else Ended(pod=name, problem=evicted.message)
    terminated = _agent_state(pod).get("terminated")
    if terminated:
        return Ended(pod=name, problem=_problem(terminated, pod))
    if status.get("phase") == "Failed":
        return Lost(message=f"pod failed: {_reason(status)}")
    if pod["metadata"].get("deletionTimestamp"):
        return Lost(message="pod is being deleted, by someone else or with its node")
    return _waiting_verdict(pod, waited_s=waited_s, patience=patience)


def _waiting_verdict(pod: Mapping[str, Any], *, waited_s: float, patience: Patience) -> Verdict | None:
    waiting = _waiting(pod)
    reason, text = waiting.get("reason", ""), _reason(waiting)
    if reason in _HOPELESS_WAITS:
        return Refused(message=f"image of a container cannot be pulled: {text}")
    if reason in _IMAGE_WAITS and waited_s > patience.image_s:
        message = f"image of a container was not pulled within {patience.image_s:g} s: {text}"
        absent = any(word in text.lower() for word in _NO_SUCH_IMAGE)
        return Refused(message=message) if absent else Lost(message=message)
    if reason in _CONFIGURATION_WAITS and waited_s > patience.image_s:
        return Refused(message=f"container cannot be created: {text}")
    unscheduled = _condition(pod, "PodScheduled", value="False")
    if unscheduled and waited_s > patience.start_s:
        return Lost(message=f"pod was not scheduled within {patience.start_s:g} s: {_reason(unscheduled)}")
    return None


def _eviction(status: Mapping[str, Any]) -> Lost | Refused | None:
    """Returns the verdict if the cluster evicted the pod; Refused if the agent's own disk usage was the cause."""
    reason = status.get("reason", "")
    disruption: Mapping[str, Any] = next(
        (
            each
            for each in status.get("conditions") or []
            if each["type"] == "DisruptionTarget" and each["status"] == "True"
        ),
        {},
    )
    if not reason and not disruption:
        return None
    if reason == _DEADLINE:
        return None
    text = _reason(status) if reason else _reason(disruption)
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


def _waiting(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the waiting state of the agent or an init container."""
    status = pod.get("status", {})
    states = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    waits = [each.get("state", {}).get("waiting") for each in states]
    known = _IMAGE_WAITS | _HOPELESS_WAITS | _CONFIGURATION_WAITS
    return next((wait for wait in waits if wait and wait.get("reason") in known), {})


def _agent_state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return _agent_of(pod.get("status", {}).get("containerStatuses") or []).get("state", {})


def _agent_of(containers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(containers) == 1:
        return containers[0]
    return next((each for each in containers if each.get("name") == AGENT_CONTAINER), {})


def _condition(document: Mapping[str, Any], kind: str, value: str = "True") -> Mapping[str, Any]:
    conditions = document.get("status", {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind and each["status"] == value), {})


def _reason(status: Mapping[str, Any]) -> str:
    reason, message = status.get("reason", ""), status.get("message", "")
    return f"{reason}: {message}" if reason and message else reason or message or "no reason given"
