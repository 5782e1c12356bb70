"""Builds the Job and the Secret of one attempt.

Invariant: the attempt's key and input are in the Secret only. The cluster never retries the Job, ends it at its deadline
without a runner, and deletes it some time after its end.
"""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fulmen_runner.agents.kubernetes.template import JobTemplate
from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.templates import Placeholders
from fulmen_service_kit.kubernetes.documents import MANAGED_BY
from fulmen_service_kit.ownership import Owner

MANAGER = "fulmen-runner"
ROLLOUT_LABEL = "fulmen.dev/rollout"
ATTEMPT_ANNOTATION = "fulmen.dev/attempt"
HOST_ANNOTATION = "fulmen.dev/runner-host"
PROCESS_ANNOTATION = "fulmen.dev/runner-process"
DEADLINE_ANNOTATION = "fulmen.dev/deadline"

INPUT_DIR = "/fulmen/input"
TASK_KEY = "task"
TASK_FILE = f"{INPUT_DIR}/{TASK_KEY}"
WORK_DIR = "/fulmen/work"

OVERTIME_S = 120
"""Time between the attempt's timeout, enforced by the runner, and the Job's own deadline."""

MAX_INPUT_BYTES = 700_000
"""A Secret holds at most 1 MiB and may contain the input twice."""

_INPUT_VOLUME, _WORK_VOLUME = "fulmen-input", "fulmen-work"
_STOP_GRACE_S = 5
_READ_ONLY = 0o444

_POD_SECURITY = {"seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """The values of one attempt for its Job and Secret.

    Attributes:
        name: Name of the Job and the Secret.
        rollout_id: Id of the rollout.
        attempt: Name of the attempt.
        owner: The runner.
        variables: The agent's environment. Secret.
        defaults: Variables that the template may override.
        input: The encoded task.
        timeout_s: Timeout of the attempt.
        ttl_s: Time after which the cluster deletes the ended Job.
        limits: Limits of the agent, and of sidecars without their own.
        requested_limits: The specification's limits, which override the template's.
        created_unix_s: Current time, Unix seconds.
    """

    name: str
    rollout_id: str
    attempt: str
    owner: Owner
    variables: Mapping[str, str] = field(repr=False)
    defaults: Mapping[str, str]
    input: bytes = field(repr=False)
    timeout_s: float
    ttl_s: int
    limits: Limits
    requested_limits: Limits
    created_unix_s: float


def secret_of(order: JobOrder, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the Secret with the attempt's environment and input, owned by the created Job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": order.name, "uid": job["metadata"]["uid"]}
    data = {**{name: value.encode() for name, value in order.variables.items()}, TASK_KEY: order.input}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**_metadata(order), "ownerReferences": [owner]},
        "immutable": True,
        "type": "Opaque",
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def job_of(template: JobTemplate, placeholders: Placeholders, order: JobOrder) -> dict[str, Any]:
    """Returns the Job, suspended until its Secret exists.

    Raises:
        AgentFailed: If the template does not match the input.
    """
    job = template.filled(placeholders)
    mine = _metadata(order)
    job["metadata"] = _merged(_of(job, "metadata"), mine)
    spec = job["spec"]
    longest_s = math.ceil(order.timeout_s) + OVERTIME_S
    spec |= {
        "suspend": True,
        "backoffLimit": 0,
        "activeDeadlineSeconds": min(spec.get("activeDeadlineSeconds", longest_s), longest_s),
        "ttlSecondsAfterFinished": order.ttl_s,
    }
    pod_template = spec["template"]
    pod_template["metadata"] = _merged(
        _of(pod_template, "metadata"), {"labels": mine["labels"], "annotations": mine["annotations"]}
    )
    pod = pod_template["spec"]
    pod["restartPolicy"] = "Never"
    pod.setdefault("terminationGracePeriodSeconds", _STOP_GRACE_S)
    if template.host_access:
        pod.setdefault("automountServiceAccountToken", False)
    else:
        pod["automountServiceAccountToken"] = False
    pod["securityContext"] = _confined(pod, _POD_SECURITY, template)
    pod["volumes"] = [
        *(pod.get("volumes") or []),
        {
            "name": _INPUT_VOLUME,
            "secret": {
                "secretName": order.name,
                "items": [{"key": TASK_KEY, "path": TASK_KEY}],
                "defaultMode": _READ_ONLY,
            },
        },
        {"name": _WORK_VOLUME, "emptyDir": {}},
    ]
    agent = pod["containers"][template.agent_index]
    _complete_agent(agent, order)
    for container in (*pod["containers"], *(pod.get("initContainers") or [])):
        container["securityContext"] = _confined(container, _CONTAINER_SECURITY, template)
        _limit(container, order.limits, order.requested_limits if container is agent else Limits())
    return job


def _complete_agent(agent: dict[str, Any], order: JobOrder) -> None:
    given = [each for each in agent.get("env") or [] if each.get("name") not in order.variables]
    named = {each.get("name") for each in given} | order.variables.keys()
    agent["env"] = [
        *({"name": name, "value": value} for name, value in order.defaults.items() if name not in named),
        *given,
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": order.name, "key": name}}} for name in order.variables),
    ]
    agent["volumeMounts"] = [
        *(agent.get("volumeMounts") or []),
        {"name": _INPUT_VOLUME, "mountPath": INPUT_DIR, "readOnly": True},
        {"name": _WORK_VOLUME, "mountPath": WORK_DIR},
    ]


def _confined(owner: Mapping[str, Any], security: Mapping[str, Any], template: JobTemplate) -> dict[str, Any]:
    """Returns a security context: the runner's, overridden by the template only if it has host access."""
    given = _of(owner, "securityContext")
    if not template.host_access:
        # The runner's must win: `capabilities: {}` would keep the container runtime's defaults.
        return {**given, **security}
    # The cluster rejects privileges combined with allowPrivilegeEscalation=false.
    return given if given.get("privileged") or _of(given, "capabilities").get("add") else {**security, **given}


def _limit(container: dict[str, Any], maximum: Limits, requested: Limits) -> None:
    resources = _of(container, "resources")
    limits = _of(resources, "limits")
    for name, text, is_requested in (
        ("memory", str(maximum.memory_bytes), requested.memory_bytes),
        ("cpu", f"{math.ceil(maximum.cpu_count * 1000)}m", requested.cpu_count),
    ):
        if is_requested or name not in limits:
            limits[name] = text
    container["resources"] = resources | {"limits": limits}


def _metadata(order: JobOrder) -> dict[str, Any]:
    return {
        "name": order.name,
        "labels": {MANAGED_BY: MANAGER, ROLLOUT_LABEL: order.rollout_id},
        "annotations": {
            ATTEMPT_ANNOTATION: order.attempt,
            HOST_ANNOTATION: order.owner.host,
            PROCESS_ANNOTATION: order.owner.process,
            DEADLINE_ANNOTATION: str(int(order.created_unix_s + order.timeout_s + OVERTIME_S)),
        },
    }


def _merged(given: dict[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**given, **mine}
    for name in ("labels", "annotations"):
        merged[name] = {**_of(given, name), **mine[name]}
    merged.pop("generateName", None)
    return merged


def _of(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a nested object, empty if absent."""
    return value.get(name) or {}
