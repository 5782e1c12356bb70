"""Templates of Jobs: what is wrong with them is said at once, and no input gets out of its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_runner.agents.job_template import read_template
from fulmen_runner.agents.quantities import quantity
from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.templates import Placeholders
from fulmen_runner.domain.errors import AgentFailed

MOST = Limits(memory_bytes=1 << 30, cpu_count=2)
AGENT = {"name": "agent", "image": "agents/mine:1"}


def template(pod: dict[str, Any] | None = None, **spec: Any) -> str:
    job = {"template": {"spec": {"containers": [AGENT], **(pod or {})}}, **spec}
    return json.dumps({"apiVersion": "batch/v1", "kind": "Job", "spec": job})


def problems_of(text: str, *, host_access: bool = False) -> str:
    with pytest.raises(AgentFailed) as raised:
        read_template(text, host_access=host_access, most=MOST)
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
        "limits.memory of the agent is 8Gi",
        "'much' is no amount",
        "FULMEN_RUNNER_JOB_HOST_ACCESS",
    ):
        assert text in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML"),
        ("- a", "not a single YAML object"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("a: &a [1]\nb: *a", "aliases"),
        ("[" * 20_000, "too deep"),
        ("when: 2020-01-01", "when"),
        ("x" * 70_000, "larger than 65536 bytes"),
        ("{}", "apiVersion"),
        (template({"containers": []}), "names no container"),
        (template({"containers": ["agent"]}), "is no container"),
        (
            template({"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]}),
            "must be called 'agent'",
        ),
        (template({"containers": [{"name": "agent"}]}), "image is missing"),
    ],
)
def test_what_is_no_template_is_said(text: str, says: str) -> None:
    assert says in problems_of(text)


def test_a_runner_may_let_templates_use_its_nodes() -> None:
    text = template({"hostNetwork": True, "volumes": [{"name": "v", "hostPath": {"path": "/data"}}]})
    assert "hostPath" in problems_of(text)
    assert read_template(text, host_access=True, most=MOST).agent_index == 0


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
    read = read_template(text, host_access=False, most=MOST)
    filled = read.filled(Placeholders(input=b"", task={"name": "n"}, named={}))
    assert filled["spec"]["template"]["spec"]["containers"][read.agent_index]["image"] == "agents/n"
    assert read.manifest["spec"]["template"]["spec"]["containers"][1]["image"] == "agents/{task.name}"


@given(st.text(max_size=60))
def test_no_input_gets_out_of_its_text(name: str) -> None:
    container = {**AGENT, "args": ["--name={task.name}", "{{kept}}"]}
    read = read_template(template({"containers": [container]}), host_access=False, most=MOST)
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
    with pytest.raises(ValueError, match="no amount"):
        quantity(text)
