"""The tests' cluster in a process of its own: two small nodes, of which one has a GPU."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.kubernetes.api import KubernetesApi
from tests.support.kubernetes.nodes import node_document

STOP_S = 60.0
SMALL: dict[str, Any] = {"cpu": "2", "memory": "4Gi"}


@contextmanager
def kubernetes_cluster(folder: Path, image_environment: Mapping[str, str]) -> Iterator[Path]:
    """Starts a cluster whose images have some variables; yields its kubeconfig."""
    words = [sys.executable, "-m", __name__, str(folder), json.dumps(dict(image_environment))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line
        try:
            yield Path(line.decode().strip())
        finally:
            process.stdin.close()
            process.wait(STOP_S)


async def serve(folder: Path, image_environment: Mapping[str, str]) -> None:
    """Runs the cluster until the input ends."""
    nodes = [node_document("node-a", **SMALL), node_document("node-b", **SMALL, gpu="1")]
    api = KubernetesApi(folder, nodes, image_environment)
    await api.start()
    print(api.kubeconfig(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await api.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), json.loads(sys.argv[2])))
