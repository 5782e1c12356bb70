"""Templates of Jobs: all problems are reported together, and input cannot change a template's structure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_runner.agents.kubernetes.template import read_template
from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.templates import Placeholders
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_service_kit.kubernetes.documents import quantity

MOST = Limits(memory_bytes=1 << 30, cpu_count=2)
AGENT = {"name": "agent", "image": "agents/mine:1"}


def template(pod: dict[str, Any] | None = None, **spec: Any) -> str:
    job = {"template": {"spec": {"containers": [AGENT], **(pod or {})}}, **spec}
    return json.dumps({"apiVersion": "batch/v1", "kind": "Job", "spec": job})


def problems_of(text: str, *, host_access: bool = False) -> str:
    with pytest.raises(AgentFailed) as raised:
        read_template(text, host_access=host_access, max_limits=MOST)
    return str(raised.value)


def test_every_problem_is_said_at_once() -> None:
    container = {
        **AGENT,
        "securityContext": {"privileged": True, "capabilities": {"add": ["SYS_ADMIN"]}},
        "ports": [{"containerPort": 1, "hostPort": 1}],
        "resources": {"limits": {"memory": "8Gi", "cpu": "much"}},
    }
    pod = {
        "containers": [
            container,
            {"name": "beside", "image": "x", "securityContext": {"allowPrivilegeEscalation": True}},
        ],
        "volumes": [{"name": "root", "hostPath": {"path": "/"}}],
        "hostPID": True,
        "hostIPC": True,
    }
    said = problems_of(template(pod, completions=2, suspend=True, activeDeadlineSeconds=0))
    for text in (
        "containers[0].securityContext.privileged",
        "containers[0].securityContext.capabilities.add",
        "containers[0].ports.hostPort",
        "containers[1].securityContext.allowPrivilegeEscalation",
        "volumes[0].hostPath",
        "hostPID",
        "hostIPC",
        "spec.completions",
        "spec.suspend",
        "activeDeadlineSeconds",
        "containers[0].resources.limits.memory is 8Gi",
        "'much' is not a quantity",
        "FULMEN_RUNNER_JOB_HOST_ACCESS",
    ):
        assert text in said


SECRET = {"secretKeyRef": {"name": "signing", "key": "k"}}
PROJECTED = {"sources": [{"serviceAccountToken": {"path": "t"}}]}
UNCONFINED = {"type": "Unconfined"}
BESIDE = {"name": "beside", "image": "x"}
USES: list[tuple[str, dict[str, Any]]] = [
    ("containers[0].env[1].valueFrom.secretKeyRef", {"containers": [{**AGENT, "env": [{}, {"valueFrom": SECRET}]}]}),
    ("initContainers[0].envFrom[0].secretRef", {"initContainers": [{**BESIDE, "envFrom": [{"secretRef": {}}]}]}),
    ("volumes[0].secret", {"volumes": [{"name": "v", "secret": {"secretName": "signing"}}]}),
    ("volumes[0].projected", {"volumes": [{"name": "v", "projected": PROJECTED}]}),
    ("volumes[0].csi", {"volumes": [{"name": "v", "csi": {"nodePublishSecretRef": {"name": "signing"}}}]}),
    ("spec.serviceAccountName", {"serviceAccountName": "runner"}),
    ("spec.serviceAccount,", {"serviceAccount": "runner"}),
    ("automountServiceAccountToken", {"automountServiceAccountToken": True}),
    ("spec.nodeName", {"nodeName": "control-plane"}),
    ("spec.securityContext.seccompProfile.type", {"securityContext": {"seccompProfile": UNCONFINED}}),
    ("spec.securityContext.seccompProfile.type", {"securityContext": {"seccompProfile": {"type": "{task.profile}"}}}),
    (
        "initContainers[0].securityContext.appArmorProfile.type",
        {"initContainers": [{**BESIDE, "securityContext": {"appArmorProfile": UNCONFINED}}]},
    ),
    ("securityContext.procMount", {"containers": [{**AGENT, "securityContext": {"procMount": "Unmasked"}}]}),
]


@pytest.mark.parametrize(("says", "pod"), USES, ids=[str(number) for number in range(len(USES))])
def test_secrets_accounts_and_unconfined_containers_need_the_runners_leave(says: str, pod: dict[str, Any]) -> None:
    said = problems_of(template(pod))
    assert says in said
    assert "FULMEN_RUNNER_JOB_HOST_ACCESS" in said
    assert read_template(template(pod), host_access=True, max_limits=MOST).host_access


def test_an_annotation_cannot_lift_a_profile() -> None:
    job = json.loads(template())
    name = "container.apparmor.security.beta.kubernetes.io/agent"
    job["spec"]["template"]["metadata"] = {"annotations": {name: "unconfined", "mine": "unconfined"}}
    said = problems_of(json.dumps(job))
    assert name in said
    assert "mine" not in said


def test_what_a_pod_may_always_have_is_let_through() -> None:
    pod = {
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "e", "emptyDir": {}}],
        "automountServiceAccountToken": False,
        "securityContext": {"runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{**AGENT, "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]}],
    }
    assert not read_template(template(pod), host_access=False, max_limits=MOST).host_access


def test_a_container_beside_the_agent_may_not_ask_for_more_either() -> None:
    pod = {"initContainers": [{**BESIDE, "resources": {"limits": {"cpu": 64}}}]}
    assert "initContainers[0].resources.limits.cpu is 64" in problems_of(template(pod))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (template({"initContainers": ["x"]}), "initContainers is not a list of objects"),
        (template({"securityContext": "none"}), "securityContext is not an object"),
        (template({"containers": [{**AGENT, "resources": {"limits": ["8Gi"]}}]}), "resources.limits is not an object"),
        ("a: [", "not YAML"),
        ("- a", "not a single YAML object"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("a: &a [1]\nb: *a", "aliases"),
        ("[" * 20_000, "too deep"),
        ("when: 2020-01-01", "when"),
        ("x" * 70_000, "larger than 65536 bytes"),
        ("{}", "apiVersion"),
        (template({"containers": []}), "containers is empty"),
        (template({"containers": ["agent"]}), "not an object"),
        (
            template({"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]}),
            "must be named 'agent'",
        ),
        (template({"containers": [{"name": "agent"}]}), "image is missing"),
    ],
)
def test_what_is_no_template_is_said(text: str, says: str) -> None:
    assert says in problems_of(text)


def test_yaml_and_the_container_called_agent() -> None:
    text = """
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
      - {name: beside, image: x}
      - {name: agent, image: "agents/{task.name}"}
"""
    read = read_template(text, host_access=False, max_limits=MOST)
    filled = read.filled(Placeholders(input=b"", task={"name": "n"}, named={}))
    assert filled["spec"]["template"]["spec"]["containers"][read.agent_index]["image"] == "agents/n"
    assert read.manifest["spec"]["template"]["spec"]["containers"][1]["image"] == "agents/{task.name}"


@given(st.text(max_size=60))
def test_no_input_gets_out_of_its_text(name: str) -> None:
    container = {**AGENT, "args": ["--name={task.name}", "{{kept}}"]}
    read = read_template(template({"containers": [container]}), host_access=False, max_limits=MOST)
    filled = read.filled(Placeholders(input=b"", task={"name": name}, named={}))
    expected = json.loads(template({"containers": [{**AGENT, "args": [f"--name={name}", "{kept}"]}]}))
    assert filled == expected


@pytest.mark.parametrize(
    ("text", "amount"),
    [("512Mi", 512 * 1024**2), ("1e3", 1000), ("500m", 0.5), (2, 2), ("1.5Gi", 1.5 * 1024**3), ("2k", 2000), ("3.", 3)],
)
def test_amounts_are_read_as_kubernetes_reads_them(text: object, amount: float) -> None:
    assert quantity(text) == pytest.approx(amount)


@pytest.mark.parametrize("text", ["", "m", "1 Gi", "-1", "1GiB", True, None, "1" * 40])
def test_what_is_no_amount_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity(text)
