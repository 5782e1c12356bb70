"""Tells from a Job and its pod whether the attempt is over, and whose fault it is if it failed.

Invariant: pure; the same documents and times give the same verdict.
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
    """How long what may pass is waited for, seconds."""

    start_s: float
    image_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The agent ended, well if `problem` is empty; its log is in the pod."""

    pod: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The agent never ran, for what its template says; there is no log."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLate:
    """The Job's own deadline passed."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The cluster ended it, for no fault of the agent's."""

    message: str


Verdict = Ended | Refused | TooLate | Lost


def verdict_of(
    job: Mapping[str, Any] | None, pods: Sequence[Mapping[str, Any]], *, waited_s: float, patience: Patience
) -> Verdict | None:
    """Returns what became of an attempt; None while it goes on.

    Args:
        job: The Job, None if there is none any more.
        pods: Its pods.
        waited_s: For how long what is seen now has been seen.
        patience: How long that may be.
    """
    if job is None:
        return Lost(message="The Job was deleted by someone else.")
    failure = _condition(job, "Failed")
    if failure.get("reason") == _DEADLINE:
        return TooLate(message=f"The Job's own deadline of {job['spec'].get('activeDeadlineSeconds')} s passed.")
    if not pods:
        if failure:
            return Lost(message=f"The pod is gone: {_said(failure)}")
        if waited_s > patience.start_s:
            return Lost(
                message=f"The cluster made no pod within {patience.start_s:g} s; quotas or admission may say why."
            )
        return None
    pod = max(pods, key=lambda each: each["metadata"].get("creationTimestamp") or "")
    return _pod_verdict(pod, waited_s=waited_s, patience=patience)


def waiting_for(pods: Sequence[Mapping[str, Any]]) -> str:
    """Returns a word for what the pods wait for; waiting is counted anew whenever it changes."""
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
        return Lost(message=f"The pod failed: {_said(status)}")
    if pod["metadata"].get("deletionTimestamp"):
        return Lost(message="The pod is being deleted, by someone else or with its node.")
    return _waiting_verdict(pod, waited_s=waited_s, patience=patience)


def _waiting_verdict(pod: Mapping[str, Any], *, waited_s: float, patience: Patience) -> Verdict | None:
    waiting = _waiting(pod)
    reason, said = waiting.get("reason", ""), _said(waiting)
    if reason in _HOPELESS_WAITS:
        return Refused(message=f"The image of a container cannot be had: {said}")
    if reason in _IMAGE_WAITS and waited_s > patience.image_s:
        message = f"The image of a container was not pulled within {patience.image_s:g} s: {said}"
        absent = any(word in said.lower() for word in _NO_SUCH_IMAGE)
        return Refused(message=message) if absent else Lost(message=message)
    if reason in _CONFIGURATION_WAITS and waited_s > patience.image_s:
        return Refused(message=f"A container cannot be made: {said}")
    unscheduled = _condition(pod, "PodScheduled", value="False")
    if unscheduled and waited_s > patience.start_s:
        return Lost(message=f"No node took the pod within {patience.start_s:g} s: {_said(unscheduled)}")
    return None


def _eviction(status: Mapping[str, Any]) -> Lost | Refused | None:
    """Tells whether the cluster ended the pod; Refused if the agent's own use of its disk was why."""
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
    said = _said(status) if reason else _said(disruption)
    if reason == "Evicted" and any(word in said for word in _OWN_EVICTION):
        return Refused(message=f"The pod took more than it may and was evicted: {said}")
    return Lost(message=f"The cluster ended the pod: {said}")


def _problem(terminated: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
    code = terminated.get("exitCode", 0)
    reason = terminated.get("reason", "")
    if reason == _OUT_OF_MEMORY:
        limit = (
            _agent_of(pod.get("spec", {}).get("containers", [])).get("resources", {}).get("limits", {}).get("memory")
        )
        return f"The container took more than its {limit} of memory and was killed."
    if reason in _NOT_STARTED:
        return f"The container cannot be started: {terminated.get('message', reason)}"
    if code > _SIGNALLED:
        return f"The container was ended by signal {code - _SIGNALLED}."
    return f"The container exited with status {code}." if code else ""


def _waiting(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns why a container waits: the agent, or one that comes before it."""
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


def _said(status: Mapping[str, Any]) -> str:
    reason, message = status.get("reason", ""), status.get("message", "")
    return f"{reason}: {message}" if reason and message else reason or message or "no reason is given"
