"""The clusters that an operator offers, by name."""

from collections.abc import Mapping

from fulmen_algorithm.cluster.gate import Gate
from fulmen_algorithm.cluster.joined import JoinedCluster, JoinedMachines
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.cluster.port import Cluster
from fulmen_algorithm.cluster.remote import Launcher, RemoteCluster
from fulmen_algorithm.cluster.settings import (
    ClusterSettings,
    JoinedSettings,
    KubernetesSettings,
    LocalSettings,
    RaySettings,
    SlurmSettings,
)
from fulmen_algorithm.runs.ports import Notify


def open_clusters(
    settings: Mapping[str, ClusterSettings], local: LocalCluster, gate: Gate, machines: JoinedMachines
) -> Mapping[str, Cluster]:
    """Returns the clusters of some settings; `machines` are those that join.

    Raises:
        ImportError: if one needs a package that is not installed.
    """
    return {name: _opened(each, local, gate, machines) for name, each in settings.items()}


def of_run(cluster: Cluster, training_run: str, notify: Notify) -> Cluster:
    """Returns a cluster as a run sees it; what the run waits for there is a notice."""
    return cluster.of_run(training_run, notify) if isinstance(cluster, JoinedCluster) else cluster


def _opened(settings: ClusterSettings, local: LocalCluster, gate: Gate, machines: JoinedMachines) -> Cluster:
    if isinstance(settings, LocalSettings):
        return local
    if isinstance(settings, JoinedSettings):
        return JoinedCluster(machines, gate, start_deadline_s=settings.start_deadline_s)
    return RemoteCluster(_launcher(settings), gate, start_deadline_s=settings.start_deadline_s)


def _launcher(settings: SlurmSettings | RaySettings | KubernetesSettings) -> Launcher:
    # Each adapter is imported only where it is used.
    if isinstance(settings, SlurmSettings):
        from fulmen_algorithm.cluster.slurm import SlurmLauncher

        return SlurmLauncher(settings)
    if isinstance(settings, KubernetesSettings):
        from fulmen_algorithm.cluster.kubernetes.launcher import KubernetesLauncher

        return KubernetesLauncher(settings)
    from fulmen_algorithm.cluster.ray import RayLauncher

    return RayLauncher(settings)
