"""Every cluster starts groups of real processes, tells their places and their ends, and leaves none of them behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio

from fulmen_algorithm.cluster.port import (
    Affinity,
    Cluster,
    ClusterFailed,
    GroupOrder,
    PlacementRefused,
    Resources,
    Wishes,
)
from tests.support.algorithm.clusters import DEADLINE_S, ENVIRONMENT, Calls, cluster_of, engine_of, order_of
from tests.support.processes import all_ended

pytestmark = [pytest.mark.xdist_group("clusters"), pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

KINDS = [
    "local",
    # Machines that these tests start by themselves: what is theirs is that of all clusters but the first.
    pytest.param("hosts", marks=pytest.mark.long),
    "slurm",
    "kubernetes",
    "joined",
    pytest.param("ray", marks=pytest.mark.long(short=True)),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with engine_of(kind, tmp_path_factory.mktemp(kind)) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kind: str, engine: dict[str, str]) -> AsyncIterator[Cluster]:
    async with cluster_of(kind, engine) as opened:
        yield opened


async def test_every_process_calls_back_and_knows_its_place(cluster, monkeypatch):
    monkeypatch.setenv("FULMEN_ALGORITHM_TOKEN", "a secret of the service")
    calls = Calls(3)
    group = await cluster.start(order_of(3, "--told", "this"), calls.welcome)
    notes = await calls.all()
    assert [note["RANK"] for note in notes] == [0, 1, 2]
    assert {note["WORLD_SIZE"] for note in notes} == {3}
    placed: dict[str, list[dict[str, int]]] = {}
    for member, note in zip(group.members, notes, strict=True):
        placed.setdefault(member.node, []).append(note)
    for mine in placed.values():
        assert [note["LOCAL_RANK"] for note in mine] == list(range(len(mine)))
        assert {note["LOCAL_WORLD_SIZE"] for note in mine} == {len(mine)}
    assert all(note["flags"] == ["--told", "this"] for note in notes)
    assert all(note["fulmen"] == ["FULMEN_GROUP"] for note in notes)
    # What an engine starts beside it does not see them either.
    for note in notes:
        parent = psutil.Process(note["pid"]).parent()
        assert parent is not None
        assert parent.pid == os.getpid() or "a secret of the service" not in parent.environ().values()
    assert [member.index for member in group.members] == [0, 1, 2]
    assert [member.pid for member in group.members] == [note["pid"] for note in notes]
    calls.close()
    await group.end()
    await all_ended(note["pid"] for note in notes)


async def test_processes_that_want_nodes_of_their_own_get_them(cluster, kind):
    order = order_of(2, wishes=Wishes(affinity=Affinity.OWN_NODES))
    if kind == "local":
        with pytest.raises(PlacementRefused, match="2 nodes are requested"):
            await cluster.plan(order)
        return
    calls = Calls(2)
    group = await cluster.start(order, calls.welcome)
    notes = await calls.all()
    assert len({member.node for member in group.members}) == 2
    assert {note["LOCAL_RANK"] for note in notes} == {0}
    calls.close()
    await group.end()


async def test_nodes_that_are_not_to_be_used_get_no_process(cluster, kind):
    if kind == "local":
        pytest.skip("There is one node.")
    found: list[str] = []
    for _ in range(2):
        calls = Calls(1)
        group = await cluster.start(order_of(1, wishes=Wishes(without=found[:])), calls.welcome)
        await calls.all()
        found += [member.node for member in group.members]
        calls.close()
        await group.end()
    assert len(set(found)) == 2


# A status is told of a group that cannot start, too.
@pytest.mark.parametrize("how", [pytest.param("exits", marks=pytest.mark.long), "is killed"])
async def test_the_end_of_a_process_is_told(cluster, how):
    calls = Calls(2)
    group = await cluster.start(order_of(2), calls.welcome)
    notes = await calls.all()
    if how == "exits":
        calls.tell(1, exit=7)
    else:
        os.kill(notes[1]["pid"], signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        text = await group.ended()
    assert ("status 7" if how == "exits" else "signal 9") in text
    calls.close()
    await group.end()
    await all_ended(note["pid"] for note in notes)


async def test_a_machine_that_is_silent_counts_as_dead(cluster, kind):
    if kind == "local":
        pytest.skip("There is no machine in between.")
    calls = Calls(2)
    group = await cluster.start(order_of(2), calls.welcome)
    notes = await calls.all()
    guardian = psutil.Process(notes[1]["pid"]).parent()
    assert guardian is not None
    guardian.suspend()
    try:
        async with asyncio.timeout(DEADLINE_S):
            text = await group.ended()
        assert "sent nothing for 5 s" in text
    finally:
        guardian.resume()
    calls.close()
    await group.end()
    await all_ended(note["pid"] for note in notes)


async def test_the_end_of_what_an_engine_has_started_is_told(cluster, kind):
    if kind == "local":
        pytest.skip("It starts the processes themselves.")
    calls = Calls(2)
    group = await cluster.start(order_of(2), calls.welcome)
    notes = await calls.all()
    guardian = psutil.Process(notes[0]["pid"]).parent()
    assert guardian is not None
    guardian.kill()
    async with asyncio.timeout(DEADLINE_S):
        assert "has ended with its guardian" in await group.ended()
    calls.close()
    await group.end()
    await all_ended(note["pid"] for note in notes)


async def test_a_process_that_does_not_want_to_end_is_killed(cluster):
    calls = Calls(1)
    group = await cluster.start(replace(order_of(1, "--stubborn"), stop_grace_s=1.0), calls.welcome)
    [note] = await calls.all()
    calls.close()
    await group.end()
    await group.end()
    await all_ended([note["pid"]])


async def test_a_group_that_cannot_start_leaves_nothing_and_says_so(cluster):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    order = GroupOrder(module="no.such.module", count=2, environment=ENVIRONMENT)
    try:
        group = await cluster.start(order, Calls(2).welcome)
    except ClusterFailed as error:
        # One has ended before the other has started.
        said = str(error)
    else:
        async with asyncio.timeout(DEADLINE_S):
            said = await group.ended()
        await group.end()
    assert "status 1" in said
    await all_ended({child.pid for child in psutil.Process().children(recursive=True)} - before)


async def test_what_never_fits_is_refused_with_every_reason(kind, engine):
    each = Resources(cpus=10**6, memory_bytes=2**60)
    wishes = Wishes(each=each, affinity=Affinity.OWN_NODES)
    async with cluster_of(kind, engine, join_s=2.0) as cluster:
        with pytest.raises(PlacementRefused) as refused:
            await cluster.plan(GroupOrder(module="any", count=10_000, wishes=wishes))
    # Machines that join may come later, so that this is the end of a wait.
    waited = ["this has not changed for 2 s, and joined are host-0 (2), host-1 (2)"] if kind == "joined" else []
    assert list(refused.value.reasons[3:]) == waited
    assert "1000000 CPUs" in refused.value.reasons[0]
    assert "bytes of memory" in refused.value.reasons[1]
    assert "own_nodes" in refused.value.reasons[2]


async def test_what_fits_is_planned_in_words(cluster):
    assert (await cluster.plan(order_of(2))).startswith("2 processes: ")


async def test_no_process_outlives_an_owner_that_is_killed(kind, engine):
    words = [sys.executable, "-m", "tests.support.algorithm.cluster_owner", kind, json.dumps(engine)]
    with subprocess.Popen(words, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    await all_ended(pids)
