"""Settings of the clusters that an operator offers to runs."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_WORD = r"^[A-Za-z0-9_.,:@/+=-]{0,128}$"
GROUP_FOLDER = "/fulmen/group"
"""Where a pod has its group's ticket."""
TEMPORARY_FOLDER = "/tmp"  # noqa: S108  (a pod's own)
_DNS_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LocalSettings(_Strict):
    """Processes on the service's own machine."""

    kind: Literal["local"] = "local"


class _Remote(_Strict):
    """What all clusters of other machines have.

    Attributes:
        start_deadline_s: Timeout of starting a group, with the time in the engine's queue, in seconds.
    """

    start_deadline_s: float = Field(default=3600.0, gt=0, le=30 * 86_400)


class SlurmSettings(_Remote):
    """Jobs of Slurm, whose commands are on the service's PATH.

    Attributes:
        folder: Folder for scripts, tickets and logs, which all nodes mount at the same path.
        partition: Partition; empty for the default.
        account: Account; empty for the default.
        python: Python with Fulmen on the nodes.
        options: Further options of `sbatch`, such as `--constraint=a100`.
        poll_s: Time between questions about a job, in seconds.
    """

    kind: Literal["slurm"]
    folder: Path
    partition: str = Field(default="", pattern=_WORD)
    account: str = Field(default="", pattern=_WORD)
    python: str = Field(default="python3", pattern=_WORD)
    options: list[Annotated[str, Field(pattern=r"^--[A-Za-z0-9_.,:@/+=-]{1,128}$")]] = []
    poll_s: float = Field(default=5.0, gt=0, le=600)


class RaySettings(_Remote):
    """Actors of a Ray cluster.

    Attributes:
        address: Address of the cluster's head, `host:port`; `ray://host:port` for a service on no node of it.
        token_file: File of the cluster's token; empty for a cluster without one.
        driver_python: Python with Ray on the service's machine; empty for the service's own.
        python: Python with Fulmen on the nodes; empty for that of Ray's workers.
    """

    kind: Literal["ray"]
    address: str = Field(pattern=_WORD, min_length=1)
    token_file: str = ""
    driver_python: str = ""
    python: str = Field(default="", pattern=_WORD)


class KubernetesVolume(_Strict):
    """A claim that all pods mount.

    Attributes:
        claim: The PersistentVolumeClaim.
        path: Where it is mounted: where the service has it.
        sub_path: Folder of the claim that is mounted; empty for all of it.
        read_only: Whether it is mounted for reading only.
    """

    claim: str = Field(pattern=_DNS_NAME)
    path: Path
    sub_path: str = Field(default="", pattern=r"^([^/].*)?$", max_length=512)
    read_only: bool = False

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("The path of a volume begins with a slash.")
        return path


class Toleration(_Strict):
    """A taint of nodes that pods tolerate; see `Toleration` of Kubernetes."""

    key: str = Field(default="", max_length=317)
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = Field(default="", max_length=63)
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class KubernetesSettings(_Remote):
    """Jobs of a Kubernetes cluster, one for each group.

    Attributes:
        image: Image of the pods: the service's, or one with the same versions.
        kubeconfig: Path of a kubeconfig; empty for the service account of the service's pod.
        context: Context of the kubeconfig; empty for its current one.
        namespace: Namespace of the Jobs; empty for that of the context or the pod.
        python: Python with Fulmen in the image.
        volumes: Claims that all pods mount.
        service_account: Service account of the pods, of which they get no token; empty for the namespace's default.
        pull_secrets: Names of the Secrets by which the image is pulled.
        node_selector: Labels of the nodes that pods may run on.
        tolerations: Taints that pods tolerate.
        priority_class: Priority class of the pods; empty for the default.
        labels: Further labels of the Job and its pods, such as that of a queue.
        pod_processes: How many processes a pod has at most, where they may share a node.
        gpu_resource: The device plugin's resource.
        user_id: User and group of the processes.
        autoscaled: Whether nodes are made when pods wait for them: then no group counts as too large.
        schedule_s: Time that a pod may wait for a node, in seconds.
        image_s: Time that a pod may wait for its image, in seconds.
        deadline_s: Time after which the cluster ends a group, in seconds.
        ttl_s: Time after which the cluster deletes an ended Job, in seconds.
    """

    kind: Literal["kubernetes"]
    image: str = Field(min_length=1, max_length=512)
    kubeconfig: str = ""
    context: str = ""
    namespace: str = Field(default="", pattern=rf"^$|{_DNS_NAME}")
    python: str = Field(default="python3", pattern=_WORD, min_length=1)
    volumes: list[KubernetesVolume] = Field(default=[], max_length=64)
    service_account: str = Field(default="", pattern=rf"^$|{_DNS_NAME}")
    pull_secrets: list[Annotated[str, Field(pattern=_DNS_NAME)]] = Field(default=[], max_length=16)
    node_selector: dict[str, str] = Field(default={}, max_length=64)
    tolerations: list[Toleration] = Field(default=[], max_length=64)
    priority_class: str = Field(default="", pattern=rf"^$|{_DNS_NAME}")
    labels: dict[str, str] = Field(default={}, max_length=64)
    pod_processes: int = Field(default=1, ge=1, le=64)
    gpu_resource: str = Field(default="nvidia.com/gpu", pattern=r"^[a-z0-9./-]{1,128}$")
    user_id: int = Field(default=10001, ge=1, lt=2**31)
    autoscaled: bool = False
    schedule_s: float = Field(default=600.0, gt=0, le=30 * 86_400)
    image_s: float = Field(default=600.0, gt=0, le=86_400)
    deadline_s: int = Field(default=30 * 86_400, gt=0, le=365 * 86_400)
    ttl_s: int = Field(default=300, ge=0, le=604_800)

    @field_validator("volumes")
    @classmethod
    def _at_their_own_paths(cls, volumes: list[KubernetesVolume]) -> list[KubernetesVolume]:
        counts = Counter([GROUP_FOLDER, TEMPORARY_FOLDER, *(str(each.path) for each in volumes)])
        if twice := sorted(path for path, count in counts.items() if count > 1):
            raise ValueError(f"A path can have only one volume: {', '.join(twice)}.")
        return volumes


class JoinedSettings(_Remote):
    """Machines that someone else starts, and that join a run with a token (`fulmen-rank`).

    The start's timeout includes the time until enough of them have joined.
    """

    kind: Literal["joined"]


ClusterName = Annotated[str, Field(pattern="^[a-z0-9-]{1,32}$")]
ClusterSettings = Annotated[
    LocalSettings | SlurmSettings | RaySettings | KubernetesSettings | JoinedSettings, Field(discriminator="kind")
]
