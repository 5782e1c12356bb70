"""Agents that are Kubernetes Jobs, against an API server that holds them against the API's schema and runs them."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fulmen.ids import parse_rollout_name
from fulmen.runner.v1.agent_spec_pb2 import AgentSpec, JobEntry, Limits
from fulmen_runner.agents.templates import escaped
from tests.support.kubernetes.api import Fate, KubernetesApi
from tests.support.runner.fixtures import World
from tests.support.runner.harness import RunnerProcess, rollouts_of
from tests.support.runner.stores import Ended

WHOLE = """
import json, os, sys, urllib.request
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
task = json.load(open(sys.argv[1]))
assert task == json.loads(os.environ["FULMEN_TASK"]) == {"question": "why"}, task
assert sys.argv[2] == os.environ["QUESTION"] == "why", sys.argv
assert os.environ["FULMEN_ATTEMPT"] == "1" and os.environ["OF_THE_TEMPLATE"] == "kept"
open(sys.argv[3] + "/mine", "w").write("x")
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
with provider.get_tracer("an-agent").start_as_current_span("in a pod"):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", method="POST",
        data=json.dumps({"model": "m", "messages": []}).encode(),
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
provider.shutdown()
print("thinking")
print(json.dumps({"mine": said == os.environ["FULMEN_ROLLOUT"] + "/attempts/1"}))
"""


def template(script: str = "", *, image: str = "agents/mine:1", job: Mapping[str, Any] | None = None) -> str:
    """Returns a Job template that runs Python."""
    arguments = ["{task_file}", "{task.question}", "{work_dir}"]
    agent = {
        "name": "agent",
        "image": image,
        "command": [sys.executable, "-c", escaped(script), *arguments],
        "env": [{"name": "OF_THE_TEMPLATE", "value": "kept"}, {"name": "FULMEN_ATTEMPT", "value": "the runner's"}],
    }
    spec = {"template": {"spec": {"containers": [agent]}}, **(job or {})}
    return json.dumps({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"labels": {"team": "x"}}, "spec": spec})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A template and what is to become of its attempt."""

    template: str
    kind: str = ""
    says: tuple[str, ...] = ()
    rewards: Mapping[tuple[str, int | None], float] = field(default_factory=dict)
    timeout_s: float = 60

    def spec(self) -> bytes:
        limits = Limits(memory_bytes=256 * 1024 * 1024)
        spec = AgentSpec(
            job=JobEntry(template=self.template), environment={"QUESTION": "{task.question}"}, limits=limits
        )
        return spec.SerializeToString()


def fated(fate: Fate, kind: str, *says: str) -> Case:
    return Case(template=template(image=fate), kind=kind, says=says)


CASES = {
    "a whole agent": Case(template=template(WHOLE), rewards={("mine", None): 1.0}),
    "a status": Case(
        template=template("import sys; sys.exit('gone wrong')"), kind="AGENT_ERROR", says=("status 1\ngone wrong",)
    ),
    "a signal": Case(template=template("import os; os.kill(os.getpid(), 11)"), kind="AGENT_ERROR", says=("signal 11",)),
    "no reward": Case(template=template("print('done')"), kind="REWARD_MISSING", says=("agent succeeded",)),
    "a secret in the log": Case(
        template=template("import os, sys; sys.exit(os.environ['OPENAI_API_KEY'])"),
        kind="AGENT_ERROR",
        says=("[masked]",),
    ),
    "a long log": Case(
        template=template("print('x' * (1 << 21))"),
        kind="AGENT_ERROR",
        says=("log of the agent exceeds 1048576 bytes",),
    ),
    "a hang": Case(
        template=template("import time; time.sleep(3600)"), kind="TIMEOUT", says=("timeout of 2 s",), timeout_s=2
    ),
    "a deadline of the template's": Case(
        template=template("import time; time.sleep(3600)", job={"activeDeadlineSeconds": 1}),
        kind="TIMEOUT",
        says=("deadline of 1 s",),
    ),
    "a Job that the API refuses": Case(
        template=template(job={"backofLimit": 3}), kind="AGENT_ERROR", says=("rejected", "backofLimit")
    ),
    "a template with problems": Case(
        template="apiVersion: batch/v2\nkind: Job\nspec: {parallelism: 3, template: {spec: {hostNetwork: true}}}",
        kind="AGENT_ERROR",
        says=("batch/v2", "spec.parallelism", "containers is empty", "hostNetwork"),
    ),
    "memory": fated(Fate.OUT_OF_MEMORY, "AGENT_ERROR", "memory limit of 268435456"),
    "no such image": fated(Fate.NO_SUCH_IMAGE, "AGENT_ERROR", "not pulled within 3 s", "not found"),
    "a bad name of an image": fated(Fate.BAD_NAME, "AGENT_ERROR", "InvalidImageName"),
    "no such program": fated(Fate.CANNOT_START, "AGENT_ERROR", "cannot be started", "no-such-program"),
    "a registry that is away": fated(Fate.NO_REGISTRY, "INFRA", "not pulled within 3 s", "i/o timeout"),
    "no node with room": fated(Fate.NO_NODE, "INFRA", "pod was not scheduled", "no memory"),
    "no pod at all": fated(Fate.NO_POD, "INFRA", "created no pod within 3 s"),
    "an eviction": fated(Fate.EVICTED, "INFRA", "low on resource"),
    "a preemption": fated(Fate.PREEMPTED, "INFRA", "PreemptionByScheduler"),
    "a lost node": fated(Fate.NODE_LOST, "INFRA", "DeletionByTaintManager"),
}


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    """Yields a cluster."""
    api = KubernetesApi(tmp_path)
    await api.start()
    yield api
    await api.close()


async def start(world: World, api: KubernetesApi, **settings: object) -> RunnerProcess:
    return await world.start(job_kubeconfig=api.kubeconfig(), container_engine="off", **settings)


def fits(got: Ended, case: Case) -> bool:
    """Returns True if an attempt ended as its case expects."""
    return got.kind == case.kind and all(text in got.message for text in case.says) and got.rewards == case.rewards


@pytest.mark.long(short=True)
async def test_what_becomes_of_jobs(world: World, api: KubernetesApi) -> None:
    await start(world, api, job_start_s=3, job_image_s=3, max_command_output_bytes=1024 * 1024)
    names: dict[str, str] = {}
    for case_name, case in CASES.items():
        agent = await world.store.publish(f"agent.{len(names)}", case.spec())
        batch = rollouts_of(agent, [{"question": "why"}], timeout_s=case.timeout_s, max_attempts=1)
        [names[case_name]] = await world.store.create(batch)
        if len(names) == 1:
            # To import the cluster's client takes longer than the time of some attempts.
            await world.store.ended(list(names.values()))
    ended = await world.store.ended(list(names.values()))
    got = {case_name: ended[name][0] for case_name, name in names.items()}
    assert {case_name: str(got[case_name]) for case_name, case in CASES.items() if not fits(got[case_name], case)} == {}
    assert got["a whole agent"].output.startswith(b"thinking\n")
    assert [span.name for span in world.double.otlp_spans] == ["in a pod"]
    assert (api.jobs, api.secrets) == ({}, {})
    await api.until(lambda: not api.pods)
    check_documents(api, rollout=names["a whole agent"])


def check_documents(api: KubernetesApi, rollout: str) -> None:
    """Checks what the runner made of a template, and that the attempt's key is in the Secret only."""
    rollout_id = str(parse_rollout_name(rollout).rollout_id)
    mine = [each for each in api.created if each["metadata"]["labels"].get("fulmen.dev/rollout") == rollout_id]
    secret, job = sorted(mine, key=lambda each: each["kind"], reverse=True)
    assert secret["metadata"]["name"] == job["metadata"]["name"]
    assert "OPENAI_API_KEY" in secret["data"]
    values = set(secret["data"].values())
    text = json.dumps(job)
    assert not [value for value in values if value in text]
    assert (job["metadata"]["labels"]["team"], job["metadata"]["annotations"]["fulmen.dev/attempt"]) == (
        "x",
        f"{rollout}/attempts/1",
    )
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (0, 180, 600)
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "268435456", "cpu": "2000m"}


@pytest.mark.parametrize("calls", [0, 1, 2])
async def test_a_cluster_that_does_not_answer_for_a_moment_costs_no_attempt(
    world: World, api: KubernetesApi, calls: int
) -> None:
    agent = await world.store.publish("agent.tests", Case(template=template("print(1)")).spec())
    await start(world, api)
    # Of the Job, the Secret and the Job's resumption: how many go through before three fail in a row.
    api.failing_writes = (calls, 3)
    [name] = await world.store.create(rollouts_of(agent, [{"question": "why"}], max_attempts=1))
    assert (await world.store.ended([name]))[name][0].rewards == {("reward", None): 1.0}
    await api.until(lambda: not api.jobs and not api.secrets)


async def test_a_job_that_was_made_by_a_call_without_an_answer_is_made_once(world: World, api: KubernetesApi) -> None:
    agent = await world.store.publish("agent.tests", Case(template=template("print(1)")).spec())
    await start(world, api)
    api.unanswered = 2
    [name] = await world.store.create(rollouts_of(agent, [{"question": "why"}], max_attempts=1))
    assert (await world.store.ended([name]))[name][0].rewards == {("reward", None): 1.0}
    assert [document["kind"] for document in api.created] == ["Job", "Secret"]


async def test_jobs_of_cancelled_attempts_and_killed_runners_are_deleted(world: World, api: KubernetesApi) -> None:
    hanging = Case(template=template("import time; time.sleep(3600)"))
    agent = await world.store.publish("agent.tests", hanging.spec())
    runner = await start(world, api)
    [cancelled, left] = await world.store.create(
        rollouts_of(agent, [{"question": "why"}] * 2, timeout_s=600, max_attempts=1)
    )
    await api.until(lambda: len(api.pods) == 2 and all(p["status"]["phase"] == "Running" for p in api.pods.values()))
    api.failing = 2  # A cluster that does not answer for a moment costs no attempt.
    await world.store.cancel([cancelled])
    await api.until(lambda: len(api.jobs) == len(api.secrets) == 1)
    [owned] = api.secrets.values()
    assert owned["metadata"]["ownerReferences"][0]["uid"] == next(iter(api.jobs.values()))["metadata"]["uid"]
    runner.send(signal.SIGKILL)
    await runner.exit_code()
    assert len(api.jobs) == 1
    quick = await world.store.publish("agent.tests", Case(template=template("print(1)")).spec())
    await start(world, api)
    [after] = await world.store.create(rollouts_of(quick, [{"question": "why"}], max_attempts=1))
    assert (await world.store.ended([after]))[after][0].rewards == {("reward", None): 1.0}
    await api.until(lambda: not api.jobs and not api.pods and not api.secrets)
    assert left not in json.dumps(list(api.jobs))


@pytest.mark.parametrize(
    ("kubeconfig", "says"), [("", "FULMEN_RUNNER_JOB_KUBECONFIG"), ("/nowhere/kubeconfig", "cannot be loaded")]
)
async def test_without_a_cluster_the_attempt_says_what_to_do(world: World, kubeconfig: str, says: str) -> None:
    agent = await world.store.publish("agent.tests", Case(template=template("print(1)")).spec())
    await world.start(job_kubeconfig=kubeconfig, container_engine="off")
    ended = await world.run(agent, {"question": "why"}, max_attempts=1)
    assert ended.kind == "INFRA"
    assert says in ended.message
