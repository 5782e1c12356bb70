"""Groups on a Ray cluster: a placement group, and one actor for each process that only starts its guardian.

Ray runs in a child process, `ray_driver`, which is all that needs the package.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any

from fulmen_algorithm.clients.child import Child
from fulmen_algorithm.cluster.port import STOP_GRACE_S, Affinity, ClusterFailed, GroupOrder, Node, Resources
from fulmen_algorithm.cluster.remote import MODULE
from fulmen_algorithm.cluster.settings import RaySettings
from fulmen_algorithm.cluster.wire import NODE_VARIABLE, VARIABLE, Ticket, without_settings

DRIVER = Path(__file__).with_name("ray_driver.py")
ANSWER_DEADLINE_S = 120.0
STRATEGIES: Mapping[Affinity, str] = {
    Affinity.PACK: "PACK",
    Affinity.SPREAD: "SPREAD",
    Affinity.ONE_NODE: "STRICT_PACK",
    Affinity.OWN_NODES: "STRICT_SPREAD",
}


class RayLauncher:
    """See `remote.Launcher`."""

    def __init__(self, settings: RaySettings) -> None:
        """Starts nothing yet.

        Raises:
            ImportError: if Ray is not installed, and no other Python is named that has it.
        """
        if not settings.driver_python and find_spec("ray") is None:
            raise ImportError("pip install 'fulmen-algorithm[ray]'")
        self._settings = settings

    async def nodes(self) -> Sequence[Node]:
        """See `remote.Launcher`."""
        launch = self._start({"do": "nodes"})
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                told = await launch.answer()
        except TimeoutError:
            raise ClusterFailed(f"Ray did not answer within {ANSWER_DEADLINE_S:g} s") from None
        finally:
            await launch.cancel()
        if "nodes" not in told:
            raise ClusterFailed(str(told.get("failed", "the driver of Ray has ended")))
        return [
            Node(
                name=node["name"],
                has=Resources(cpus=node["cpus"], gpus=node["gpus"], memory_bytes=node["memory_bytes"]),
            )
            for node in told["nodes"]
        ]

    def together(self, order: GroupOrder) -> int:
        """See `remote.Launcher`."""
        return 1

    async def launch(self, order: GroupOrder, ticket: Ticket) -> "RayLaunch":
        """See `remote.Launcher`."""
        each = order.wishes.each
        return self._start(
            {
                "do": "launch",
                "count": order.count,
                # Ray places nothing by a bundle of nothing.
                "cpus": each.cpus or 1,
                "gpus": each.gpus,
                "memory_bytes": each.memory_bytes,
                "strategy": STRATEGIES[order.wishes.affinity],
                "without": sorted(order.wishes.without),
                "python": self._settings.python,
                "module": MODULE,
                "variables": {VARIABLE: ticket.text()},
                "node_variable": NODE_VARIABLE,
            }
        )

    def _start(self, order: Mapping[str, object]) -> "RayLaunch":
        environment = without_settings()
        # The driver's folder has a module called `ray`, too.
        environment |= {"PYTHONSAFEPATH": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        if self._settings.token_file:
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self._settings.token_file}
        python = self._settings.driver_python or sys.executable
        try:
            child = Child.start([python, str(DRIVER)], environment=environment, output=PIPE)
            child.send(json.dumps({"address": self._settings.address, **order}).encode() + b"\n")
        except OSError as error:
            raise ClusterFailed(f"the driver of Ray cannot be started: {error}") from error
        return RayLaunch(child)


class RayLaunch:
    """See `remote.Launch`."""

    def __init__(self, driver: Child) -> None:
        self._driver = driver

    async def answer(self) -> dict[str, Any]:
        """Reads a message of the driver; empty if it has ended."""
        async for line in self._driver.lines():
            with suppress(ValueError):
                told = json.loads(line)
                if isinstance(told, dict):
                    return told
        return {}

    async def failed(self) -> str:
        """See `remote.Launch`."""
        told = await self.answer()
        return str(told.get("failed", "the driver of Ray has ended"))

    async def cancel(self) -> None:
        """See `remote.Launch`."""
        self._driver.close_input()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await self._driver.wait()
        await self._driver.end(grace_s=STOP_GRACE_S)
