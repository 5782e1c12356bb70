"""The driver of a group on a Ray cluster: a process of its own, so that Ray never runs in the service. Needs only Ray.

Its input is one line of JSON, `{"do": "nodes"}` or an order; its output are lines of JSON. It ends when its input does, and Ray
then ends the actors, and those the guardians that they started. No data goes through Ray.
"""

import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PR_SET_PDEATHSIG = 1  # linux/prctl.h
SIGKILL = 9
CHECK_S = 1.0
NODE_LABEL = "ray.io/node-id"


class Launcher:
    """Starts one guardian where Ray has placed it, with the devices that Ray has given it."""

    def run(self, python: str, module: str, variables: dict[str, str], node_variable: str) -> int:
        """Runs the guardian to its end; returns its exit status."""
        library, here = ctypes.CDLL(None), ray.get_runtime_context()
        # An engine over several machines (vLLM) asks the same cluster for its own processes.
        variables = {**variables, node_variable: node_name(here.get_node_id()), "RAY_ADDRESS": here.gcs_address}
        return subprocess.run(
            [python or sys.executable, "-m", module],
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
            preexec_fn=lambda: library.prctl(PR_SET_PDEATHSIG, SIGKILL),
        ).returncode


def node_name(node_id: str) -> str:
    """Returns the name of a node: nodes may share a machine."""
    return f"{socket.gethostname()}/{node_id[:6]}"


def nodes() -> list[dict[str, Any]]:
    """Returns the live nodes and what they have."""
    return [
        {
            "name": _name_of(node),
            "cpus": int(node["Resources"].get("CPU", 0)),
            "gpus": int(node["Resources"].get("GPU", 0)),
            "memory_bytes": int(node["Resources"].get("memory", 0)),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]


def _name_of(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}"


def launch(order: dict[str, Any]) -> None:
    """Places the group and watches its actors; reports when one has ended. The others live as long as this process."""
    each = {"CPU": order["cpus"], "GPU": order["gpus"], "memory": order["memory_bytes"]}
    bundle = {name: value for name, value in each.items() if value}
    avoided = [node["NodeID"] for node in ray.nodes() if _name_of(node) in order["without"]]
    # Older releases of Ray have no labels, so labels are used only if a node is to be avoided.
    labels = {"bundle_label_selector": [{NODE_LABEL: f"!in({','.join(avoided)})"}] * order["count"]} if avoided else {}
    group = placement_group([dict(bundle) for _ in range(order["count"])], strategy=order["strategy"], **labels)
    ray.get(group.ready())
    runs = []
    for index in range(order["count"]):
        placed = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        actor: Any = ray.remote(Launcher).options(
            num_cpus=order["cpus"],
            num_gpus=order["gpus"],
            memory=order["memory_bytes"] or None,
            scheduling_strategy=placed,
        )
        runs.append(
            actor.remote().run.remote(order["python"], order["module"], order["variables"], order["node_variable"])
        )
    ended: list[Any] = []
    while not ended:
        ended, _ = ray.wait(runs, timeout=CHECK_S)
    try:
        say(failed=f"a guardian ended with status {ray.get(ended[0])}")
    except ray.exceptions.RayError as error:
        say(failed=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    threading.Event().wait()


def say(**told: object) -> None:
    """Sends a message to the service."""
    print(json.dumps(told), flush=True)


def end_with_input() -> None:
    """Ends this process when its input ends."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Carries out the orders from standard input."""
    order = json.loads(sys.stdin.readline())
    # Whatever Ray waits for, this process ends with the service; Ray then ends the actors.
    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        ray.init(
            address=order["address"],
            namespace="fulmen",
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
        if order["do"] == "nodes":
            say(nodes=nodes())
            return
        launch(order)
    except Exception as error:  # noqa: BLE001  (whatever Ray raises, it is reported to the service)
        say(failed=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


if __name__ == "__main__":
    main()
