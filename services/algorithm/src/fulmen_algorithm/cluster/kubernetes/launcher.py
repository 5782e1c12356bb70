"""Groups as Jobs of a Kubernetes cluster, one for each, whose pods each are a guardian.

Invariant: a group leaves nothing. Its Job is deleted with it; what a killed service left ends by itself, since guardians end
with the service, and is deleted at the next start or by the cluster.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import structlog

from fulmen_algorithm.cluster.kubernetes.failures import Failure, Watch
from fulmen_algorithm.cluster.kubernetes.manifest import (
    BY_INDEX,
    CA_KEY,
    CONTAINER,
    HOST_ANNOTATION,
    LAUNCHER_ANNOTATION,
    MANAGER,
    PROCESS_ANNOTATION,
    TICKET_KEY,
    annotations_of,
    job_of,
    processes_per_pod,
    secret_of,
)
from fulmen_algorithm.cluster.kubernetes.room import added, requests_of, room_of, usable_nodes
from fulmen_algorithm.cluster.port import ClusterFailed, GroupOrder, Node, PlacementRefused
from fulmen_algorithm.cluster.settings import GROUP_FOLDER, KubernetesSettings
from fulmen_algorithm.cluster.wire import Ticket
from fulmen_service_kit.kubernetes.documents import MANAGED_BY
from fulmen_service_kit.kubernetes.errors import KubernetesError
from fulmen_service_kit.ownership import Owner

if TYPE_CHECKING:
    from fulmen_service_kit.kubernetes.client import KubernetesCluster

IN_CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"
POLL_S = 20.0
"""Time between looks at a Job whose pods do not change, in seconds."""
RETRY_PAUSE_S = 1.0
CANCEL_S = 10.0
"""Time to delete a Job while the cluster does not answer, in seconds. It is deleted before the next start then."""
LOG_BYTES = 400
"""Number of characters of a log that are shown."""
_log = structlog.get_logger()


class KubernetesLauncher:
    """See `remote.Launcher`."""

    def __init__(self, settings: KubernetesSettings) -> None:
        """Connects to nothing yet.

        Raises:
            ImportError: if the client is not installed.
        """
        if find_spec("kubernetes_asyncio") is None:
            raise ImportError("pip install 'fulmen-algorithm[kubernetes]'")
        self._settings = settings
        # No other pod has this one's name; other hosts may share theirs.
        self._owner = Owner.this_process(socket.gethostname(), is_only_host=bool(os.environ.get(IN_CLUSTER_VARIABLE)))
        self._mark = token_hex(8)
        self._live: set[str] = set()

    async def nodes(self) -> Sequence[Node]:
        """See `remote.Launcher`. Pods of Jobs end: only what other pods request counts as taken.

        Raises:
            PlacementRefused: if no node could take a pod.
        """
        if self._settings.autoscaled:
            return []
        try:
            async with self._connected() as cluster:
                nodes = [node async for node in cluster.nodes()]
                usable = usable_nodes(nodes, self._settings)
                if not usable:
                    why = f"none of {len(nodes)} nodes has the labels of node_selector and only tolerated taints"
                    raise PlacementRefused([why])
                return room_of(usable, await _requested(cluster), self._settings)
        except KubernetesError as error:
            if error.is_forbidden:
                return []
            raise ClusterFailed(str(error)) from error

    def together(self, order: GroupOrder) -> int:
        """See `remote.Launcher`, for a pod's processes."""
        return processes_per_pod(order, self._settings)

    async def launch(self, order: GroupOrder, ticket: Ticket) -> "KubernetesLaunch":
        """See `remote.Launcher`."""
        name = f"fulmen-{ticket.group[:12]}"
        job = job_of(name, order, self._settings, annotations_of(self._owner, self._mark))
        try:
            files = await asyncio.to_thread(_files, ticket)
            cluster = await _connect(self._settings)
        except (KubernetesError, OSError) as error:
            raise ClusterFailed(str(error)) from error
        await self._remove_leftovers(cluster)
        self._live.add(name)
        launch = KubernetesLaunch(name, cluster, Watch(name, self._settings), self._live)
        try:
            # Pods wait for the Secret, which cannot belong to the Job before that is there.
            made = await cluster.create_job(job)
            if BY_INDEX not in made["spec"]:
                raise ClusterFailed(f"The cluster does not know {BY_INDEX} of Jobs: it needs Kubernetes 1.29 or newer.")
            await cluster.create_secret(secret_of(made, files))
        except BaseException as error:
            with suppress(ClusterFailed):
                await asyncio.shield(launch.cancel())
            if isinstance(error, KubernetesError):
                raise ClusterFailed(str(error)) from error
            raise
        return launch

    @asynccontextmanager
    async def _connected(self) -> "AsyncGenerator[KubernetesCluster, None]":
        cluster = await _connect(self._settings)
        try:
            yield cluster
        finally:
            await cluster.close()

    async def _remove_leftovers(self, cluster: "KubernetesCluster") -> None:
        """Deletes Jobs of dead services, and those that this one could not delete."""
        try:
            found = await cluster.jobs(f"{MANAGED_BY}={MANAGER}")
            for name in [job["metadata"]["name"] for job in found if self._is_leftover(job)]:
                await cluster.delete_job(name, "Foreground")
                _log.info("leftover_job_deleted", job=name)
        except KubernetesError as error:
            # They end by themselves. A cluster that is away fails the start.
            _log.warning("leftover_jobs_not_deleted", reason=str(error))

    def _is_leftover(self, job: Mapping[str, Any]) -> bool:
        metadata = job["metadata"]
        annotations = metadata.get("annotations") or {}
        if metadata.get("deletionTimestamp"):
            return False
        if annotations.get(LAUNCHER_ANNOTATION) == self._mark:
            return metadata["name"] not in self._live
        return self._owner.is_leftover(
            host=annotations.get(HOST_ANNOTATION, ""),
            process=annotations.get(PROCESS_ANNOTATION, ""),
            # The cluster itself ends a Job at its deadline.
            deadline_unix_s=float("inf"),
            now_unix_s=time.time(),
        )


class KubernetesLaunch:
    """See `remote.Launch`."""

    def __init__(self, name: str, cluster: "KubernetesCluster", watch: Watch, live: set[str]) -> None:
        self._name = name
        self._cluster = cluster
        self._watch = watch
        self._live = live

    async def failed(self) -> str:
        """See `remote.Launch`."""
        while True:
            try:
                # In this order: the pod that has ended a Job is among those that are seen after it.
                job = await self._cluster.job(self._name)
                pods = await self._cluster.pods(self._name)
                failure = self._watch.failure(job, pods.items, time.monotonic())
                if failure is not None:
                    return await self._told(failure)
                await self._cluster.pods_changed(self._name, pods.version, min(POLL_S, self._watch.shortest_s))
            except KubernetesError as error:
                if error.is_forbidden:
                    return f"the service may not see the pods of Job {self._name}: {error.reason}"
                # While the cluster does not answer, nothing is known.
                await asyncio.sleep(RETRY_PAUSE_S)

    async def cancel(self) -> None:
        """See `remote.Launch`."""
        if self._name not in self._live:
            return
        self._live.discard(self._name)
        deadline = time.monotonic() + CANCEL_S
        try:
            while True:
                try:
                    await self._cluster.delete_job(self._name, "Foreground")
                except KubernetesError as error:
                    if not error.is_transient or time.monotonic() > deadline:
                        raise ClusterFailed(str(error)) from error
                    await asyncio.sleep(RETRY_PAUSE_S)
                else:
                    return
        finally:
            await self._cluster.close()

    async def _told(self, failure: Failure) -> str:
        """Returns a failure with the end of the log."""
        if not failure.pod:
            return failure.text
        end = b""
        try:
            async with aclosing(self._cluster.log(failure.pod, CONTAINER)) as chunks:
                async for chunk in chunks:
                    end = (end + chunk)[-LOG_BYTES:]
        except KubernetesError as error:
            return f"{failure.text}; its log cannot be read: {error.reason}"
        said = " ".join(end.decode(errors="replace").split())
        return f"{failure.text}; its log ends: {said}" if said else failure.text


async def _connect(settings: KubernetesSettings) -> "KubernetesCluster":
    # In a thread: the import takes about a second.
    client = await asyncio.to_thread(import_module, "fulmen_service_kit.kubernetes.client")
    kubeconfig = settings.kubeconfig or os.environ.get("KUBECONFIG", "")
    cluster: KubernetesCluster = await client.connect(
        kubeconfig=kubeconfig, context=settings.context, namespace=settings.namespace, in_cluster=not kubeconfig
    )
    return cluster


async def _requested(cluster: "KubernetesCluster") -> Mapping[str, Mapping[str, float]]:
    """Returns what pods that stay request, by node; nothing if the service may not read them."""
    requested: dict[str, Mapping[str, float]] = {}
    try:
        async for pod in cluster.lasting_pods():
            node = pod["spec"]["nodeName"]
            requested[node] = added(requested.get(node, {}), requests_of(pod))
    except KubernetesError as error:
        if not error.is_forbidden:
            raise
    return requested


def _files(ticket: Ticket) -> Mapping[str, bytes]:
    """Returns the files of the group's Secret: the ticket, and the authorities of the service's certificate."""
    if not ticket.ca_file:
        return {TICKET_KEY: ticket.text().encode()}
    there = replace(ticket, ca_file=f"{GROUP_FOLDER}/{CA_KEY}")
    return {TICKET_KEY: there.text().encode(), CA_KEY: Path(ticket.ca_file).read_bytes()}
