"""A real Ray cluster of several nodes on this machine, with token authentication, in a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NODES = 2
NODE_CPUS = 2
STOP_S = 60.0


@dataclass(frozen=True)
class RayNodes:
    """A running cluster.

    Attributes:
        address: Address of the head.
        token: File of its token.
        killable: Beginnings of the ids of the nodes besides the head.
    """

    address: str
    token: Path
    killable: list[str]
    _process: subprocess.Popen[bytes] = field(repr=False)

    def kill(self, node: str) -> None:
        """Kills a node: its raylet, and all that ran under it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{node}\n".encode())
        self._process.stdin.flush()
        assert self._process.stdout.readline(), "the cluster has ended"


@contextmanager
def ray_cluster(folder: Path, *, nodes: int = NODES, cpus: int = NODE_CPUS) -> Iterator[RayNodes]:
    """Starts a cluster of so many nodes with so many CPUs each."""
    token = folder / "ray-token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "tests.support.algorithm.ray_nodes", str(nodes), str(cpus)]
    with (
        (folder / "ray.log").open("wb") as log,
        subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "ray.log").read_text()
        try:
            address, *killable = json.loads(line)
            yield RayNodes(address, token, killable, process)
        finally:
            process.stdin.close()
            process.wait(STOP_S)


def serve(nodes: int, cpus: int) -> None:
    """Runs the nodes until the input ends; kills those that it names."""
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "num_gpus": 0, **small})
    others = {}
    for _ in range(nodes - 1):
        node = cluster.add_node(num_cpus=cpus, num_gpus=0, **small)
        others[node.node_id[:6]] = node
    print(json.dumps([cluster.address, *others]), flush=True)
    for line in sys.stdin:
        cluster.remove_node(others.pop(line.strip()), allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
