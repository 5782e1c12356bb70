"""What a Kubernetes cluster is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fulmen_algorithm.cluster.kubernetes.manifest import annotations_of, job_of, processes_per_pod, secret_of
from fulmen_algorithm.cluster.kubernetes.room import requests_of, room_of, usable_nodes
from fulmen_algorithm.cluster.port import Affinity, GroupOrder, Node, Resources, Wishes
from fulmen_service_kit.ownership import Owner
from tests.support.algorithm.clusters import kubernetes_settings
from tests.support.kubernetes.nodes import node_document
from tests.support.kubernetes.schema import schema_problems

GIB = 2**30
NAME = "fulmen-0123456789ab"
EACH = Resources(cpus=8, gpus=1, memory_bytes=64 * GIB)
ORDER = GroupOrder(module="any", count=4, wishes=Wishes(each=EACH, affinity=Affinity.OWN_NODES))
MARKS = annotations_of(Owner(host="fulmen-algorithm-0", process="1-2-3"), "c0ffee")
OWN = {"labelSelector": {"matchLabels": {"fulmen.dev/group": NAME}}, "topologyKey": "kubernetes.io/hostname"}
WHOLE: dict[str, Any] = {
    "image": "registry.example.com/fulmen-algorithm:1",
    "python": "python3",
    "volumes": [
        {"claim": "fulmen-shared", "path": "/shared/runs", "sub_path": "runs"},
        {"claim": "models", "path": "/models", "read_only": True},
        {"claim": "fulmen-shared", "path": "/shared/cache", "sub_path": "cache"},
    ],
    "service_account": "ranks",
    "pull_secrets": ["registry"],
    "node_selector": {"example.com/gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "priority_class": "training",
    "labels": {"kueue.x-k8s.io/queue-name": "ranks"},
    "deadline_s": 3600,
    "ttl_s": 60,
}


LABELS = {
    "kueue.x-k8s.io/queue-name": "ranks",
    "app.kubernetes.io/managed-by": "fulmen-algorithm",
    "fulmen.dev/group": NAME,
}
JOB: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {
        "name": NAME,
        "labels": LABELS,
        "annotations": {
            "fulmen.dev/service-host": "fulmen-algorithm-0",
            "fulmen.dev/service-process": "1-2-3",
            "fulmen.dev/launcher": "c0ffee",
        },
    },
    "spec": {
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "backoffLimitPerIndex": 0,
        "activeDeadlineSeconds": 3600,
        "ttlSecondsAfterFinished": 60,
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 5,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 10001,
                    "runAsGroup": 10001,
                    "fsGroup": 10001,
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "member",
                        "image": "registry.example.com/fulmen-algorithm:1",
                        "command": ["python3", "-m", "fulmen_algorithm.cluster.member"],
                        "env": [
                            {"name": "FULMEN_GROUP_FILE", "value": "/fulmen/group/ticket"},
                            {"name": "FULMEN_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                            {"name": "HOME", "value": "/tmp"},
                        ],
                        "resources": {
                            "requests": {"cpu": "8", "memory": str(64 * GIB)},
                            "limits": {"nvidia.com/gpu": "1"},
                        },
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                            "readOnlyRootFilesystem": True,
                        },
                        "volumeMounts": [
                            {"name": "group", "mountPath": "/fulmen/group", "readOnly": True},
                            {"name": "tmp", "mountPath": "/tmp"},
                            {"name": "claim-0", "mountPath": "/shared/runs", "subPath": "runs"},
                            {"name": "claim-1", "mountPath": "/models", "readOnly": True},
                            {"name": "claim-0", "mountPath": "/shared/cache", "subPath": "cache"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "group", "secret": {"secretName": NAME, "defaultMode": 0o440}},
                    {"name": "tmp", "emptyDir": {}},
                    {"name": "claim-0", "persistentVolumeClaim": {"claimName": "fulmen-shared"}},
                    {"name": "claim-1", "persistentVolumeClaim": {"claimName": "models"}},
                ],
                "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [OWN]}},
                "serviceAccountName": "ranks",
                "imagePullSecrets": [{"name": "registry"}],
                "nodeSelector": {"example.com/gpu": "h200"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "priorityClassName": "training",
            },
        },
    },
}


def test_the_job_of_a_group() -> None:
    assert schema_problems(JOB) == ""
    assert job_of(NAME, ORDER, kubernetes_settings(**WHOLE), MARKS) == JOB


@pytest.mark.parametrize(
    ("affinity", "placed"),
    [
        (
            Affinity.PACK,
            {
                "affinity": {
                    "podAffinity": {
                        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": OWN}]
                    }
                }
            },
        ),
        (
            Affinity.SPREAD,
            {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", **OWN}]},
        ),
        (
            Affinity.ONE_NODE,
            {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [OWN]}}},
        ),
        (
            Affinity.OWN_NODES,
            {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [OWN]}}},
        ),
    ],
)
def test_an_affinity_is_the_schedulers(affinity: Affinity, placed: dict[str, Any]) -> None:
    order = GroupOrder(module="any", count=2, wishes=Wishes(affinity=affinity))
    job = job_of(NAME, order, kubernetes_settings(), MARKS)
    assert schema_problems(job) == ""
    pod = job["spec"]["template"]["spec"]
    assert {key: pod[key] for key in ("affinity", "topologySpreadConstraints") if key in pod} == placed


def test_nodes_that_are_not_to_be_used_are_none_of_the_schedulers() -> None:
    wishes = Wishes(affinity=Affinity.OWN_NODES, without=["node-b", "node-a"])
    job = job_of(NAME, GroupOrder(module="any", count=2, wishes=wishes), kubernetes_settings(), MARKS)
    assert schema_problems(job) == ""
    affinity = job["spec"]["template"]["spec"]["affinity"]
    others = {"key": "metadata.name", "operator": "NotIn", "values": ["node-a", "node-b"]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [others]}]}}
    assert affinity["nodeAffinity"] == required
    assert affinity.keys() == {"nodeAffinity", "podAntiAffinity"}


@pytest.mark.parametrize(
    ("count", "most", "affinity", "each"),
    [
        (16, 8, Affinity.PACK, 8),
        (4, 8, Affinity.ONE_NODE, 4),
        (12, 8, Affinity.PACK, 6),
        (13, 8, Affinity.PACK, 1),
        (16, 8, Affinity.OWN_NODES, 1),
        (16, 8, Affinity.SPREAD, 1),
        (16, 1, Affinity.PACK, 1),
    ],
)
def test_pods_have_as_many_processes_as_they_may_and_all_the_same(count, most, affinity, each) -> None:
    order = GroupOrder(module="any", count=count, wishes=Wishes(affinity=affinity))
    assert processes_per_pod(order, kubernetes_settings(pod_processes=most)) == each


def test_a_pod_of_several_processes_asks_for_what_they_need_together() -> None:
    order = GroupOrder(module="any", count=16, wishes=Wishes(each=EACH))
    job = job_of(NAME, order, kubernetes_settings(pod_processes=8), MARKS)
    assert schema_problems(job) == ""
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["command"][1:] == ["-m", "fulmen_algorithm.cluster.members", "8"]
    assert container["resources"] == {
        "requests": {"cpu": "64", "memory": str(512 * GIB)},
        "limits": {"nvidia.com/gpu": "8"},
    }
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]


def test_what_is_not_asked_for_is_not_there() -> None:
    job = job_of(NAME, GroupOrder(module="any", count=1), kubernetes_settings(), MARKS)
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {}
    assert (
        not {"serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations", "priorityClassName"} & pod.keys()
    )


def test_the_secret_belongs_to_the_job_and_holds_the_files() -> None:
    secret = secret_of({"metadata": {"name": NAME, "uid": "4b3c"}}, {"ticket": b"a secret"})
    assert schema_problems(secret) == ""
    [owner] = secret["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": NAME, "uid": "4b3c"}
    assert (secret["immutable"], secret["data"]) == (True, {"ticket": "YSBzZWNyZXQ="})
    job = job_of(NAME, ORDER, kubernetes_settings(**WHOLE), MARKS)
    assert secret["data"]["ticket"] not in json.dumps(job)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"image": ""}, "image"),
        ({"namespace": "Two Words"}, "namespace"),
        ({"volumes": [{"claim": "models", "path": "models"}]}, "begins with a slash"),
        ({"volumes": [{"claim": "Models", "path": "/models"}]}, "claim"),
        ({"tolerations": [{"operator": "Perhaps"}]}, "operator"),
        ({"python": "python3 -c"}, "python"),
        ({"user_id": 0}, "user_id"),
        ({"host_network": True}, "host_network"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kubernetes_settings(**wrong)


def test_a_path_that_is_mounted_twice_is_refused() -> None:
    volumes = [{"claim": "one", "path": "/shared"}, {"claim": "two", "path": "/shared"}, {"claim": "x", "path": "/tmp"}]
    with pytest.raises(ValueError, match="/shared, /tmp"):
        kubernetes_settings(volumes=volumes)


def test_a_node_has_room_for_what_it_has_besides_what_stays_there() -> None:
    nodes = [
        node_document("node-a", cpu="7910m", memory="64Gi", gpu="8"),
        node_document("node-b", cpu="4", memory="8Gi"),
    ]
    requested = {"node-a": {"cpu": 0.5, "memory": 2 * GIB, "nvidia.com/gpu": 1}, "node-b": {"cpu": 5.0}}
    assert room_of(nodes, requested, kubernetes_settings()) == [
        Node(name="node-a", has=Resources(cpus=7, gpus=7, memory_bytes=62 * GIB)),
        Node(name="node-b", has=Resources(cpus=0, gpus=0, memory_bytes=8 * GIB)),
    ]


def test_nodes_that_take_no_pods_of_ours_are_left_out_and_those_that_do_not_now_are_not() -> None:
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    unreachable = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
    nodes = [
        node_document("plain", cpu="1"),
        node_document("tainted", cpu="1", spec={"taints": [taint]}),
        node_document("discouraged", cpu="1", spec={"taints": [{**taint, "effect": "PreferNoSchedule"}]}),
        node_document("selected", cpu="1"),
        node_document("cordoned", cpu="1", spec={"unschedulable": True}),
        node_document("unreachable", cpu="1", spec={"taints": [unreachable]}),
    ]
    nodes[3]["metadata"]["labels"]["gpu"] = "h200"
    open_ones = {"plain", "discouraged", "selected", "cordoned", "unreachable"}

    def usable(**given: object) -> set[str]:
        return {node["metadata"]["name"] for node in usable_nodes(nodes, kubernetes_settings(**given))}

    assert usable() == open_ones
    assert usable(node_selector={"gpu": "h200"}) == {"selected"}
    for tolerated in (
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        {"operator": "Exists"},
    ):
        assert usable(tolerations=[tolerated]) == open_ones | {"tainted"}
    for other in (
        {"key": "nvidia.com/gpu", "value": "absent"},
        {"key": "another", "operator": "Exists"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"},
    ):
        assert usable(tolerations=[other]) == open_ones


def test_a_pod_requests_the_most_that_it_has_at_a_time() -> None:
    def container(cpu: str, **more: object) -> dict[str, object]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {
        "initContainers": [container("4"), container("1", restartPolicy="Always"), container("5")],
        "containers": [container("500m"), container("2"), {}],
        "overhead": {"cpu": "250m"},
    }
    assert requests_of({"spec": spec}) == {"cpu": 6.25}
    assert requests_of({"spec": {**spec, "initContainers": [container("1", restartPolicy="Always")]}}) == {"cpu": 3.75}
