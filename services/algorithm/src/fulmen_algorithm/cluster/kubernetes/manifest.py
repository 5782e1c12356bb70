"""The Job of a group and the Secret of its ticket.

A group is one Indexed Job: its pods are identical, none is restarted, and a failed one does not stop the others, which may
pass on their state. Its Secret belongs to it and is deleted with it. A pod runs one process of the group, or several that
share its resources.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from fulmen_algorithm.cluster.port import Affinity, GroupOrder, Resources, Wishes
from fulmen_algorithm.cluster.remote import MODULE
from fulmen_algorithm.cluster.settings import GROUP_FOLDER, TEMPORARY_FOLDER, KubernetesSettings
from fulmen_algorithm.cluster.wire import FILE_VARIABLE, NODE_VARIABLE
from fulmen_service_kit.kubernetes.documents import MANAGED_BY
from fulmen_service_kit.ownership import Owner

SEVERAL = "fulmen_algorithm.cluster.members"
"""What a pod with several processes starts."""
MANAGER = "fulmen-algorithm"
GROUP_LABEL = "fulmen.dev/group"
HOST_ANNOTATION = "fulmen.dev/service-host"
PROCESS_ANNOTATION = "fulmen.dev/service-process"
LAUNCHER_ANNOTATION = "fulmen.dev/launcher"
CONTAINER = "member"
BY_INDEX = "backoffLimitPerIndex"
"""Retries of each pod. With any other limit the first pod that fails ends the Job."""
TICKET_KEY, CA_KEY = "ticket", "ca.crt"

_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_STOP_GRACE_S = 5
_OWNER_AND_GROUP_READ = 0o440


def annotations_of(owner: Owner, launcher: str) -> dict[str, str]:
    """Returns the annotations by which what a dead service has left is found; `launcher` is unique in its process."""
    return {HOST_ANNOTATION: owner.host, PROCESS_ANNOTATION: owner.process, LAUNCHER_ANNOTATION: launcher}


def processes_per_pod(order: GroupOrder, settings: KubernetesSettings) -> int:
    """Returns how many processes of a group each pod has: as many as allowed and the same in all of them."""
    if order.wishes.together:
        return order.wishes.together
    if order.wishes.affinity in (Affinity.SPREAD, Affinity.OWN_NODES):
        return 1
    return next(each for each in range(settings.pod_processes, 0, -1) if order.count % each == 0)


def job_of(
    name: str, order: GroupOrder, settings: KubernetesSettings, annotations: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the Job of a group."""
    labels = {**settings.labels, MANAGED_BY: MANAGER, GROUP_LABEL: name}
    pods = order.count // processes_per_pod(order, settings)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels, "annotations": dict(annotations)},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            BY_INDEX: 0,
            "activeDeadlineSeconds": settings.deadline_s,
            "ttlSecondsAfterFinished": settings.ttl_s,
            "template": {"metadata": {"labels": labels}, "spec": _pod_of(name, order, settings)},
        },
    }


def secret_of(job: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the Secret of files that belongs to a created Job and has its name."""
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "labels": {MANAGED_BY: MANAGER, GROUP_LABEL: metadata["name"]},
            "ownerReferences": [owner],
        },
        "immutable": True,
        "type": "Opaque",
        "data": {key: base64.b64encode(content).decode() for key, content in files.items()},
    }


def _pod_of(name: str, order: GroupOrder, settings: KubernetesSettings) -> dict[str, Any]:
    processes = processes_per_pod(order, settings)
    mounts = [
        {"name": "group", "mountPath": GROUP_FOLDER, "readOnly": True},
        {"name": "tmp", "mountPath": TEMPORARY_FOLDER},
        *_mounts(settings),
    ]
    volumes = [
        {"name": "group", "secret": {"secretName": name, "defaultMode": _OWNER_AND_GROUP_READ}},
        {"name": "tmp", "emptyDir": {}},
        *_volumes(settings),
    ]
    if processes > 1:
        # By which they exchange tensors. Containers have 64 MiB of it unless more is requested.
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})  # noqa: S108  (the pod's own)
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{processes}Gi"}})
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _STOP_GRACE_S,
        # Processes need nothing of the cluster's API, and no variables of its services.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user_id,
            "runAsGroup": settings.user_id,
            "fsGroup": settings.user_id,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": settings.image,
                "command": [settings.python, "-m", *([MODULE] if processes == 1 else [SEVERAL, str(processes)])],
                "env": [
                    {"name": FILE_VARIABLE, "value": f"{GROUP_FOLDER}/{TICKET_KEY}"},
                    {"name": NODE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    # Where caches may be written: the root of the file system is read-only.
                    {"name": "HOME", "value": TEMPORARY_FOLDER},
                ],
                "resources": _resources(order.wishes.each, processes, settings.gpu_resource),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
        **_placed(order.wishes, {"matchLabels": {GROUP_LABEL: name}}),
    }
    given: dict[str, Any] = {
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": each} for each in settings.pull_secrets],
        "nodeSelector": settings.node_selector,
        "tolerations": [each.model_dump(exclude_defaults=True) for each in settings.tolerations],
        "priorityClassName": settings.priority_class,
    }
    return pod | {key: value for key, value in given.items() if value}


def _mounts(settings: KubernetesSettings) -> Sequence[dict[str, Any]]:
    return [
        {
            "name": _volume_name(settings, each.claim),
            "mountPath": str(each.path),
            **({"subPath": each.sub_path} if each.sub_path else {}),
            **({"readOnly": True} if each.read_only else {}),
        }
        for each in settings.volumes
    ]


def _volumes(settings: KubernetesSettings) -> Sequence[dict[str, Any]]:
    # A claim may be mounted at several places.
    claims = dict.fromkeys(each.claim for each in settings.volumes)
    return [{"name": _volume_name(settings, claim), "persistentVolumeClaim": {"claimName": claim}} for claim in claims]


def _volume_name(settings: KubernetesSettings, claim: str) -> str:
    return f"claim-{[each.claim for each in settings.volumes].index(claim)}"


def _resources(each: Resources, processes: int, gpu_resource: str) -> dict[str, Any]:
    requests = {"cpu": each.cpus, "memory": each.memory_bytes}
    asked = {name: str(amount * processes) for name, amount in requests.items() if amount}
    # GPUs are not shared: their request is their limit.
    limits = {gpu_resource: str(each.gpus * processes)} if each.gpus else {}
    return {key: value for key, value in {"requests": asked, "limits": limits}.items() if value}


def _placed(wishes: Wishes, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what has the scheduler place the pods of a group as they want to be."""
    term = {"labelSelector": group, "topologyKey": _HOSTNAME}
    placed: dict[str, Any] = {}
    affinity: dict[str, Any] = {}
    match wishes.affinity:
        case Affinity.PACK:
            affinity = {"podAffinity": {_PREFERRED: [{"weight": 100, "podAffinityTerm": term}]}}
        case Affinity.ONE_NODE:
            affinity = {"podAffinity": {_REQUIRED: [term]}}
        case Affinity.OWN_NODES:
            affinity = {"podAntiAffinity": {_REQUIRED: [term]}}
        case Affinity.SPREAD:
            placed["topologySpreadConstraints"] = [{"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", **term}]
    if wishes.without:
        others = {"key": "metadata.name", "operator": "NotIn", "values": sorted(wishes.without)}
        affinity["nodeAffinity"] = {_REQUIRED: {"nodeSelectorTerms": [{"matchFields": [others]}]}}
    return placed | ({"affinity": affinity} if affinity else {})
