"""Groups as Jobs, on a cluster whose pods are processes: what becomes of them, and that nothing is left."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.kubernetes import launcher as launching
from fulmen_algorithm.cluster.kubernetes.launcher import KubernetesLaunch, KubernetesLauncher
from fulmen_algorithm.cluster.port import (
    Affinity,
    ClusterFailed,
    GroupOrder,
    PlacementRefused,
    ProcessGroup,
    Resources,
    Wishes,
)
from fulmen_algorithm.cluster.wire import Ticket
from fulmen_service_kit.kubernetes import client
from tests.support.algorithm.clusters import DEADLINE_S, ENVIRONMENT, Calls, kubernetes_settings, order_of, remote
from tests.support.kubernetes.api import Fate, KubernetesApi
from tests.support.kubernetes.nodes import node_document
from tests.support.processes import all_ended
from tests.support.soak import long_but

pytestmark = [pytest.mark.xdist_group("clusters"), pytest.mark.timeout(300)]

SMALL = {"cpu": "2", "memory": "4Gi"}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    nodes = [node_document("node-a", **SMALL), node_document("node-b", **SMALL, gpu="1")]
    api = KubernetesApi(tmp_path, nodes, ENVIRONMENT)
    await api.start()
    yield api
    await api.close()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate(GateOptions(silence_s=5.0))
    yield gate
    gate.close()


def launcher_of(api: KubernetesApi, **settings: Any) -> KubernetesLauncher:
    return KubernetesLauncher(kubernetes_settings(kubeconfig=str(api.kubeconfig()), **settings))


async def started(launcher: KubernetesLauncher, gate: Gate, count: int = 1) -> tuple[ProcessGroup, Calls, list[int]]:
    """Starts a group; returns it with its calls and process ids."""
    calls = Calls(count)
    group = await remote(launcher, gate).start(order_of(count), calls.welcome)
    return group, calls, [note["pid"] for note in await calls.all()]


async def test_the_secret_of_a_group_is_in_its_jobs_secret_alone_and_goes_with_it(api, gate):
    group, calls, _ = await started(launcher_of(api), gate, 2)
    [job], [secret] = api.jobs.values(), api.secrets.values()
    [owner] = secret["metadata"]["ownerReferences"]
    assert owner["uid"] == job["metadata"]["uid"]
    ticket = json.loads(base64.b64decode(secret["data"]["ticket"]))
    assert ticket["secret"] not in json.dumps([job, *api.pods.values()])
    assert sorted(pod["spec"]["nodeName"] for pod in api.pods.values()) == ["node-a", "node-a"]
    calls.close()
    await group.end()
    await api.until(lambda: not api.jobs and not api.pods and not api.secrets)


async def test_pods_get_the_authorities_of_the_services_certificate(api, gate, tmp_path):
    authorities = tmp_path / "ca.pem"
    authorities.write_text("a certificate")
    ticket = Ticket(service="tcp://127.0.0.1:9", group="ab" * 16, secret="cd" * 32, ca_file=str(authorities))
    launch = await launcher_of(api, image=Fate.NO_NODE).launch(order_of(1), ticket)
    [secret] = api.secrets.values()
    files = {name: base64.b64decode(content).decode() for name, content in secret["data"].items()}
    assert files["ca.crt"] == "a certificate"
    assert json.loads(files["ticket"])["ca_file"] == "/fulmen/group/ca.crt"
    await launch.cancel()
    await api.until(lambda: not api.jobs)


@pytest.mark.parametrize(
    ("affinity", "nodes"),
    long_but(
        [(Affinity.ONE_NODE, 1), (Affinity.OWN_NODES, 2)],
        [(Affinity.PACK, 1), (Affinity.ONE_NODE, 1), (Affinity.SPREAD, 2), (Affinity.OWN_NODES, 2)],
    ),
)
async def test_pods_are_placed_as_the_group_wants_it(api, gate, affinity, nodes):
    calls = Calls(2)
    order = order_of(2, wishes=Wishes(each=Resources(cpus=1), affinity=affinity))
    group = await remote(launcher_of(api), gate).start(order, calls.welcome)
    assert len({member.node for member in group.members}) == nodes
    calls.close()
    await group.end()


async def test_processes_of_a_pod_share_what_it_has_and_end_with_the_first_that_fails(api, gate):
    calls = Calls(4)
    order = order_of(4, wishes=Wishes(each=Resources(cpus=1)))
    group = await remote(launcher_of(api, pod_processes=2), gate).start(order, calls.welcome)
    notes = await calls.all()
    assert sorted(pod["spec"]["nodeName"] for pod in api.pods.values()) == ["node-a", "node-b"]
    assert [note["LOCAL_RANK"] for note in notes] == [0, 1, 0, 1]
    assert {note["LOCAL_WORLD_SIZE"] for note in notes} == {2}
    guardian = psutil.Process(notes[0]["pid"]).parent()
    assert guardian is not None
    guardian.kill()
    async with asyncio.timeout(DEADLINE_S):
        assert "has ended with its guardian" in await group.ended()
    await all_ended(note["pid"] for note in notes[:2])
    # The other pod runs on, and is asked for what it has.
    await api.until(lambda: sorted(pod["status"]["phase"] for pod in api.pods.values()) == ["Failed", "Running"])
    assert all(psutil.pid_exists(note["pid"]) for note in notes[2:])
    calls.close()
    await group.end()
    await all_ended(note["pid"] for note in notes[2:])
    await api.until(lambda: not api.jobs and not api.pods)


async def test_a_cluster_that_ends_all_pods_with_the_first_is_told_to_be_too_old(api, gate):
    api.unknown = {"backoffLimitPerIndex"}
    with pytest.raises(
        ClusterFailed, match=r"does not know backoffLimitPerIndex of Jobs: it needs Kubernetes 1\.29 or newer"
    ):
        await remote(launcher_of(api), gate).start(order_of(2), Calls(2).welcome)
    await api.until(lambda: not api.jobs and not api.pods)


async def test_a_pod_of_several_processes_ends_well_when_all_of_them_have(api, gate, monkeypatch):
    cancel = KubernetesLaunch.cancel

    async def cancel_what_has_ended(launch: KubernetesLaunch) -> None:
        await api.until(lambda: all(pod["status"]["phase"] == "Succeeded" for pod in api.pods.values()))
        await cancel(launch)

    # Its guardians end well when the service says so; only then is the Job deleted.
    monkeypatch.setattr(KubernetesLaunch, "cancel", cancel_what_has_ended)
    calls = Calls(2)
    group = await remote(launcher_of(api, pod_processes=2), gate).start(order_of(2), calls.welcome)
    await calls.all()
    calls.close()
    await group.end()
    await api.until(lambda: not api.jobs and not api.pods)


@pytest.mark.parametrize(
    ("fate", "says"),
    [
        (Fate.NO_NODE, "got no node within 1 s: Unschedulable: 0/3 nodes: no memory"),
        (Fate.NO_SUCH_IMAGE, "was not given its image within 1 s: ImagePullBackOff: .* not found"),
        (Fate.NO_REGISTRY, "was not given its image within 1 s: ErrImagePull: .* i/o timeout"),
        (Fate.BAD_NAME, "the image of pod .* cannot be pulled: InvalidImageName"),
        (Fate.NO_POD, "the cluster made 0 pods of Job .* within 1 s; check quotas"),
        (Fate.EVICTED, "the cluster ended pod .*: Evicted: The node was low on resource: memory."),
        (Fate.PREEMPTED, "the cluster ended pod .*: PreemptionByScheduler"),
        (Fate.NODE_LOST, "the cluster ended pod .*: DeletionByTaintManager"),
        (Fate.OUT_OF_MEMORY, r"was ended by signal 9 \(OOMKilled\)"),
        (Fate.CANNOT_START, r"ended with status 128 \(StartError: exec: no-such-program: not found\)"),
    ],
)
async def test_why_pods_do_not_start_is_told_and_nothing_is_left(api, gate, fate, says):
    launcher = launcher_of(api, image=fate, schedule_s=1, image_s=1)
    with pytest.raises(ClusterFailed, match=says):
        await remote(launcher, gate).start(order_of(2), Calls(2).welcome)
    await api.until(lambda: not api.jobs and not api.pods and not api.secrets)


async def test_the_last_words_of_a_pod_are_told(api, gate):
    with pytest.raises(ClusterFailed, match=r"ended with status 1$"):
        await remote(launcher_of(api, python="false"), gate).start(order_of(1), Calls(1).welcome)
    with pytest.raises(ClusterFailed, match=r"ended with status 1; its log ends: cat: .*option"):
        await remote(launcher_of(api, python="cat"), gate).start(order_of(1), Calls(1).welcome)


async def test_a_group_for_which_there_are_too_few_nodes_is_told_why(api, gate):
    order = order_of(3, wishes=Wishes(affinity=Affinity.OWN_NODES))
    with pytest.raises(ClusterFailed, match=r"0/2 nodes are available: node\(s\) didn't match pod anti-affinity rules"):
        await remote(launcher_of(api, schedule_s=1), gate).start(order, Calls(3).welcome)
    await api.until(lambda: not api.jobs and not api.pods)


async def test_an_eviction_is_told_and_leaves_the_other_pods_until_the_group_is_ended(api, gate):
    group, calls, pids = await started(launcher_of(api), gate, 2)
    evicted, left = api.pods
    await api.evict(evicted)
    async with asyncio.timeout(DEADLINE_S):
        assert "has ended with its guardian" in await group.ended()
    assert list(group.lost.values()) == [True]
    assert api.pods[left]["status"]["phase"] == "Running"
    calls.close()
    await group.end()
    await all_ended(pids)
    await api.until(lambda: not api.jobs and not api.pods)


async def test_a_job_that_someone_else_deletes_is_told(api, gate):
    starting = asyncio.create_task(
        remote(launcher_of(api, image=Fate.NO_NODE), gate).start(order_of(1), Calls(1).welcome)
    )
    await api.until(lambda: api.pods)
    other = await client.connect(kubeconfig=str(api.kubeconfig()), context="", namespace="", in_cluster=False)
    await other.delete_job(next(iter(api.jobs)))
    await other.close()
    with pytest.raises(ClusterFailed, match="was deleted by someone else"):
        await starting


async def test_a_cluster_that_does_not_answer_for_a_moment_costs_nothing(api, gate):
    api.failing_writes = (0, 2)
    group, calls, _ = await started(launcher_of(api), gate)
    api.failing = 2
    calls.close()
    await group.end()
    await api.until(lambda: not api.jobs and not api.pods and not api.secrets)


async def test_a_job_whose_making_was_not_answered_is_made_once(api, gate):
    api.unanswered = 2
    group, calls, _ = await started(launcher_of(api), gate)
    assert [document["kind"] for document in api.created] == ["Job", "Secret"]
    calls.close()
    await group.end()


async def test_a_cluster_that_is_away_at_the_start_is_told(api, gate, monkeypatch):
    monkeypatch.setattr(client, "RETRY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(launching, "CANCEL_S", 0.0)
    launcher = launcher_of(api)
    port = await api.go_away()
    with pytest.raises(ClusterFailed, match="Kubernetes cluster failed: Cannot connect"):
        await remote(launcher, gate).start(order_of(1), Calls(1).welcome)
    with pytest.raises(ClusterFailed, match="Kubernetes cluster failed: Cannot connect"):
        await remote(launcher, gate).plan(order_of(1))
    await api.start(port)
    group, calls, _ = await started(launcher, gate)
    calls.close()
    await group.end()


async def test_a_group_lives_on_while_the_cluster_is_away_and_is_deleted_at_the_next_start(api, gate, monkeypatch):
    monkeypatch.setattr(launching, "CANCEL_S", 0.0)
    launcher = launcher_of(api)
    group, calls, pids = await started(launcher, gate)
    [name] = api.jobs
    port = await api.go_away()
    ended = asyncio.create_task(group.ended())
    calls.tell(0, exit=7)
    async with asyncio.timeout(DEADLINE_S):
        assert "status 7" in await ended
    calls.close()
    await group.end()
    await all_ended(pids)
    assert list(api.jobs) == [name]
    await api.start(port)
    group, calls, _ = await started(launcher, gate)
    await api.until(lambda: name not in api.jobs)
    assert len(api.jobs) == 1
    calls.close()
    await group.end()


def dead() -> str:
    """Returns the id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return str(done.pid)


async def test_what_dead_services_left_is_deleted_and_what_others_have_is_not(api, gate):
    launcher = launcher_of(api, image=Fate.NO_NODE)
    mine = await launcher.launch(order_of(1), Ticket(service="tcp://127.0.0.1:9", group="aa" * 16, secret="cd" * 32))
    other = launcher_of(api, image=Fate.NO_NODE)
    theirs = await other.launch(order_of(1), Ticket(service="tcp://127.0.0.1:9", group="bb" * 16, secret="cd" * 32))
    left = await other.launch(order_of(1), Ticket(service="tcp://127.0.0.1:9", group="cc" * 16, secret="cd" * 32))
    annotations = api.jobs["fulmen-cccccccccccc"]["metadata"]["annotations"]
    process = annotations["fulmen.dev/service-process"]
    annotations["fulmen.dev/service-process"] = f"{dead()}-{process.partition('-')[2]}"
    last = await launcher.launch(order_of(1), Ticket(service="tcp://127.0.0.1:9", group="dd" * 16, secret="cd" * 32))
    await api.until(lambda: "fulmen-cccccccccccc" not in api.jobs)
    assert sorted(api.jobs) == ["fulmen-aaaaaaaaaaaa", "fulmen-bbbbbbbbbbbb", "fulmen-dddddddddddd"]
    for launch in (mine, theirs, left, last):
        await launch.cancel()
    await api.until(lambda: not api.jobs and not api.secrets)


async def test_the_cluster_deletes_what_a_killed_service_has_left(api, gate):
    engine = {"kubeconfig": str(api.kubeconfig()), "ttl_s": 0}
    words = [sys.executable, "-m", "tests.support.algorithm.cluster_owner", "kubernetes", json.dumps(engine)]
    owner = await asyncio.create_subprocess_exec(*words, env={**ENVIRONMENT}, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pids = [int(word) for word in (await owner.stdout.readline()).split()]
    assert len(pids) == 2
    owner.kill()
    await owner.wait()
    await all_ended(pids)
    await api.until(lambda: not api.jobs and not api.pods and not api.secrets)


async def test_a_plan_counts_what_stays_on_nodes_and_not_what_ends(api, gate, monkeypatch):
    monkeypatch.setattr(client, "PAGE_ITEMS", 1)
    for name, policy, cpu in (("web", "Always", "1500m"), ("log", "Always", "100m"), ("job", "OnFailure", "2")):
        container = {"name": "main", "resources": {"requests": {"cpu": cpu}}}
        api.others[name] = {
            "metadata": {"name": name},
            "spec": {"restartPolicy": policy, "nodeName": "node-a", "containers": [container]},
        }
    cluster = remote(launcher_of(api), gate)
    one = GroupOrder(module="any", count=2, wishes=Wishes(each=Resources(cpus=1)))
    assert await cluster.plan(one) == "2 processes: 2 on node-b"
    big = GroupOrder(module="any", count=2, wishes=Wishes(each=Resources(cpus=2, gpus=2), affinity=Affinity.OWN_NODES))
    with pytest.raises(PlacementRefused) as refused:
        await cluster.plan(big)
    assert refused.value.reasons == (
        "2 processes ask for 4 CPUs, but the nodes have 2 together",
        "a process asks for 2 GPUs, but the largest node has 1",
        "2 nodes are requested (own_nodes), but only 0 can take a process",
    )


async def test_a_plan_counts_pods_and_not_processes(api, gate):
    ranks = GroupOrder(module="any", count=4, wishes=Wishes(each=Resources(cpus=1)))
    assert await remote(launcher_of(api, pod_processes=2), gate).plan(ranks) == (
        "4 processes in 2 pods: 2 on node-a, 2 on node-b"
    )
    whole = remote(launcher_of(api, pod_processes=4), gate)
    assert await whole.room(ranks) == 0
    with pytest.raises(PlacementRefused, match="a pod of 4 processes asks for 4 CPUs, but the largest node has 2"):
        await whole.plan(ranks)
    engines = GroupOrder(module="any", count=4, wishes=Wishes(each=Resources(cpus=1), together=1))
    assert await whole.plan(engines) == "4 processes: 2 on node-a, 2 on node-b"


async def test_a_plan_without_any_node_that_takes_pods_is_refused(api, gate):
    selective = launcher_of(api, node_selector={"gpu": "h200"})
    with pytest.raises(PlacementRefused, match="none of 2 nodes has the labels of node_selector"):
        await remote(selective, gate).plan(order_of(1))


async def test_a_service_that_may_not_read_nodes_and_one_of_an_autoscaled_cluster_plan_nothing(api, gate):
    big = GroupOrder(module="any", count=64, wishes=Wishes(each=Resources(cpus=64)))
    told = "64 processes, on nodes that the cluster chooses (it does not report its nodes)"
    assert await remote(launcher_of(api, autoscaled=True), gate).plan(big) == told
    api.forbidden = {"/api/v1/nodes", "/api/v1/pods"}
    assert await remote(launcher_of(api), gate).plan(big) == told


async def test_a_service_that_may_read_nodes_and_not_their_pods_takes_them_for_empty(api, gate):
    api.forbidden = {"/api/v1/pods"}
    one = GroupOrder(module="any", count=4, wishes=Wishes(each=Resources(cpus=1)))
    assert await remote(launcher_of(api), gate).plan(one) == "4 processes: 2 on node-a, 2 on node-b"


async def test_a_right_that_is_missing_is_told(api, gate):
    jobs, pods = (f"/{part}/namespaces/agents/{kind}" for part, kind in (("apis/batch/v1", "jobs"), ("api/v1", "pods")))
    for forbidden, told in ((jobs, "has no role for"), (pods, "may not see the pods of Job")):
        api.forbidden = {forbidden}
        with pytest.raises(ClusterFailed, match=told):
            await remote(launcher_of(api, image=Fate.NO_NODE), gate).start(order_of(1), Calls(1).welcome)
    await api.until(lambda: not api.jobs)
