"""Clusters for tests: every adapter, and machines that are processes, in network namespaces where there are any."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.kubernetes.launcher import KubernetesLauncher
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.cluster.port import Cluster, GroupOrder, Node, Resources, Wishes
from fulmen_algorithm.cluster.ray import RayLauncher
from fulmen_algorithm.cluster.remote import MODULE, Launcher, RemoteCluster
from fulmen_algorithm.cluster.settings import KubernetesSettings, RaySettings, SlurmSettings
from fulmen_algorithm.cluster.slurm import SlurmLauncher
from fulmen_algorithm.cluster.wire import NODE_VARIABLE, VARIABLE, Ticket, read_note, without_settings, write_note
from tests.support.algorithm import fake_slurm
from tests.support.algorithm.joined_machines import open_door
from tests.support.algorithm.ray_nodes import ray_cluster
from tests.support.kubernetes.serve import kubernetes_cluster

PROCESS = "tests.support.algorithm.cluster_process"
DEADLINE_S = 90.0
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
"""What processes need to find the tests' modules."""


@dataclass
class Hosts:
    """Machines that are started by hand: each word list stands before the command of one guardian. A `Launcher`.

    Attributes:
        within: Words before the command, by process.
        variables: Variables of each process's machine.
        has: What each machine has.
    """

    within: Sequence[Sequence[str]]
    variables: Sequence[Mapping[str, str]] = ()
    has: Resources = field(default_factory=lambda: Resources(cpus=2, gpus=0, memory_bytes=2**33))
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    async def nodes(self) -> Sequence[Node]:
        return [Node(name=f"host-{index}", has=self.has) for index in range(len(self.within))]

    def together(self, order: GroupOrder) -> int:
        return 1

    async def launch(self, order: GroupOrder, ticket: Ticket) -> Hosts:
        launched = replace(self, started=[])
        machines = list(zip(self.within, self.variables or [{}] * len(self.within), strict=True))
        machines = [each for each in machines if each[1].get(NODE_VARIABLE) not in order.wishes.without]
        for index in range(order.count):
            within, variables = machines[index % len(machines)]
            words = [*within, sys.executable, "-m", MODULE]
            environment = {**without_settings(), **ENVIRONMENT, **variables, VARIABLE: ticket.text()}
            launched.started.append(subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL))
        self.started.extend(launched.started)
        return launched

    async def failed(self) -> str:
        waits = [asyncio.to_thread(each.wait) for each in self.started]
        status = await next(asyncio.as_completed(waits))
        return f"a guardian ended with status {status}"

    async def cancel(self) -> None:
        for each in self.started:
            each.kill()
            await asyncio.to_thread(each.wait)


@contextmanager
def engine_of(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Starts what a kind of cluster needs; yields what `cluster_of` is told of it."""
    if kind == "ray":
        with ray_cluster(folder) as ray:
            yield {"address": ray.address, "token": str(ray.token)}
    elif kind == "slurm":
        yield {"folder": str(folder), **fake_slurm.install(folder)}
    elif kind == "kubernetes":
        with kubernetes_cluster(folder, ENVIRONMENT) as kubeconfig:
            yield {"kubeconfig": str(kubeconfig)}
    else:
        yield {}


@asynccontextmanager
async def cluster_of(kind: str, engine: Mapping[str, str], *, join_s: float = DEADLINE_S) -> AsyncIterator[Cluster]:
    """Opens a cluster of a kind on this machine; one that machines join waits `join_s` for more of them."""
    gate = Gate(GateOptions(silence_s=5.0))
    # Where its commands are found.
    with mock.patch.dict(os.environ, {**engine, **ENVIRONMENT} if kind == "slurm" else {}):
        try:
            if kind == "joined":
                async with _joined(join_s) as cluster:
                    yield cluster
            else:
                yield LocalCluster() if kind == "local" else remote(_launcher(kind, engine), gate)
        finally:
            gate.close()


@asynccontextmanager
async def _joined(join_s: float) -> AsyncIterator[Cluster]:
    with TemporaryDirectory() as folder:
        async with open_door(Path(folder), start_deadline_s=join_s) as door:
            for node in ("host-0", "host-1"):
                door.start_machine(node, FULMEN_RANK_WARM_START="false")
            await door.until("host-0", "host-1")
            yield door.cluster


def remote(launcher: Launcher, gate: Gate) -> RemoteCluster:
    """Returns the cluster of a launcher."""
    return RemoteCluster(launcher, gate, start_deadline_s=DEADLINE_S)


def _launcher(kind: str, engine: Mapping[str, str]) -> Launcher:
    if kind == "ray":
        settings = RaySettings(kind="ray", address=engine["address"], token_file=engine["token"], python=sys.executable)
        return RayLauncher(settings)
    if kind == "slurm":
        folder = Path(engine["folder"])
        return SlurmLauncher(SlurmSettings(kind="slurm", folder=folder, python=sys.executable, poll_s=0.1))
    if kind == "kubernetes":
        return KubernetesLauncher(kubernetes_settings(**engine))
    return Hosts([[], []], variables=[{NODE_VARIABLE: "host-0"}, {NODE_VARIABLE: "host-1"}])


def kubernetes_settings(**given: Any) -> KubernetesSettings:
    """Returns settings of the tests' cluster."""
    defaults = {"kind": "kubernetes", "image": "fulmen-algorithm:tests", "python": sys.executable}
    return KubernetesSettings(**{**defaults, **given})


class Calls:
    """The connections of a group's processes, by rank."""

    def __init__(self, count: int) -> None:
        self.notes: dict[int, dict[str, Any]] = {}
        self.writers: dict[int, StreamWriter] = {}
        self._count = count
        self._complete = asyncio.Event()

    async def welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        note = await read_note(reader)
        self.notes[note["RANK"]], self.writers[note["RANK"]] = note, writer
        if len(self.notes) == self._count:
            self._complete.set()

    async def all(self) -> list[dict[str, Any]]:
        """Waits for what all of them say; by rank."""
        async with asyncio.timeout(DEADLINE_S):
            await self._complete.wait()
        return [self.notes[rank] for rank in sorted(self.notes)]

    def tell(self, rank: int, **note: object) -> None:
        write_note(self.writers[rank], note)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


def order_of(count: int, *flags: str, wishes: Wishes | None = None) -> GroupOrder:
    """Returns an order of processes of the tests."""
    wishes = wishes or Wishes()
    return GroupOrder(module=PROCESS, count=count, flags=flags, environment=ENVIRONMENT, wishes=wishes)
