"""The template of a Job in deploy/kubernetes, and what the runner makes of one, hold against the API's schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fulmen_runner.agents.kubernetes.manifest import JobOrder, job_of, secret_of
from fulmen_runner.agents.kubernetes.template import read_template
from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.templates import Placeholders
from fulmen_service_kit.ownership import Owner
from tests.support.kubernetes.schema import schema_problems

MOST = Limits(memory_bytes=4 << 30, cpu_count=2)
KEY = "the attempt's key"


def order(**changes: object) -> JobOrder:
    values = {
        "name": "fulmen-a",
        "rollout_id": "a",
        "attempt": "projects/default/rollouts/a/attempts/1",
        "owner": Owner(host="here", process="1-1-1"),
        "variables": {"OPENAI_API_KEY": KEY, "DATABASE_URL": "the runner's"},
        "defaults": {"QUIET": "1", "DATABASE_URL": "no"},
        "input": b'{"difficulty": "hard"}',
        "timeout_s": 60.0,
        "ttl_s": 600,
        "limits": MOST,
        "requested_limits": Limits(),
        "created_unix_s": 0.0,
    }
    return JobOrder(**{**values, **changes})


def test_the_template_is_valid(repository_root: Path) -> None:
    [template] = yaml.safe_load_all((repository_root / "deploy" / "kubernetes" / "agent-job.yaml").read_text())
    assert schema_problems(template) == ""


def test_what_the_runner_makes_of_the_example_is_valid(repository_root: Path) -> None:
    text = (repository_root / "deploy" / "kubernetes" / "agent-job.yaml").read_text()
    template = read_template(text, host_access=False, max_limits=MOST)
    named = {"task_file": "/fulmen/input/task", "work_dir": "/fulmen/work"}
    placeholders = Placeholders(input=b"", task={"difficulty": "hard"}, named=named)
    job = job_of(template, placeholders, order())
    secret = secret_of(order(), {"metadata": {"uid": "4b3c"}})
    assert (schema_problems(job), schema_problems(secret)) == ("", "")
    assert KEY not in json.dumps(job)
    [agent] = job["spec"]["template"]["spec"]["containers"]
    assert agent["command"][-3:] == ["/fulmen/input/task", "--difficulty", "hard"]
    assert [each["name"] for each in agent["env"]] == ["QUIET", "OPENAI_API_KEY", "DATABASE_URL"]
    # Its own limits stay, unless its publisher asks for others in the specification.
    assert agent["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
    asked = Limits(memory_bytes=1 << 29)
    other = job_of(
        template, placeholders, order(limits=Limits(memory_bytes=1 << 29, cpu_count=2), requested_limits=asked)
    )
    assert other["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {
        "cpu": "1",
        "memory": "536870912",
    }


@pytest.mark.parametrize("host_access", [False, True])
def test_every_container_is_limited_and_confined(host_access: bool) -> None:
    own = {"runAsUser": 999, "capabilities": {}, "allowPrivilegeEscalation": None}
    mighty = {"securityContext": {"privileged": True}} if host_access else {}
    pod = {
        "containers": [{"name": "agent", "image": "a"}, {"name": "beside", "image": "b", "securityContext": own}],
        "initContainers": [
            {"name": "first", "image": "c", "resources": {"limits": {"memory": "1Gi"}}},
            {"name": "mighty", "image": "d", **mighty},
        ],
        **({"automountServiceAccountToken": True} if host_access else {"automountServiceAccountToken": None}),
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": pod}}}
    template = read_template(json.dumps(job), host_access=host_access, max_limits=MOST)
    asked = Limits(memory_bytes=1 << 29)
    made = job_of(
        template,
        Placeholders(input=b"", task={}, named={}),
        order(limits=Limits(memory_bytes=1 << 29, cpu_count=2), requested_limits=asked),
    )
    assert schema_problems(made) == ""
    spec = made["spec"]["template"]["spec"]
    agent, beside, first, last = spec["containers"] + spec["initContainers"]
    walls = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert spec["automountServiceAccountToken"] is host_access
    assert (agent["securityContext"], first["securityContext"]) == (walls, walls)
    assert beside["securityContext"] == (own if host_access else {"runAsUser": 999, **walls})
    assert last["securityContext"] == ({"privileged": True} if host_access else walls)
    # What the agent's publisher asks for is the agent's only where another container names its own.
    assert [each["resources"]["limits"] for each in (agent, beside, first)] == [
        {"memory": "536870912", "cpu": "2000m"},
        {"memory": "536870912", "cpu": "2000m"},
        {"memory": "1Gi", "cpu": "2000m"},
    ]


def test_a_misspelt_field_is_found() -> None:
    pod = {"metadata": {}, "spec": {"containers": [{"name": "a", "image": "b"}], "restartPolicy": "Never"}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {"template": pod}}
    assert schema_problems(job) == ""
    assert "backofLimit" in schema_problems({**job, "spec": {"template": pod, "backofLimit": 1}})
