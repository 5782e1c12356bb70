"""Chooses TCP ports for the services: the well-known one if it is free, otherwise a free one.

Free ports are taken from below the range that the kernel gives to outgoing connections, so that a service that
restarts a minute later still finds its port free.

A port is chosen seconds before its service listens, and is free again while the service restarts. Its lock, held meanwhile,
is the UDP port of the same number: no two stacks of one machine hold it, whichever user starts them, and none outlives its
process.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fulmen_cli.local.errors import PortInUseError

__all__ = ["DEFAULT_PORTS", "PortChooser", "choose_ports", "is_free"]

DEFAULT_PORTS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "store": 7101,
        "store_metrics": 7102,
        "store_http": 7103,
        "llm_proxy_http": 7200,
        "llm_proxy": 7201,
        "llm_proxy_metrics": 7202,
        "algorithm": 7301,
        "algorithm_metrics": 7302,
        "runner": 7401,
        "runner_metrics": 7402,
        "console_http": 7500,
        "console": 7501,
        "console_metrics": 7502,
    }
)
LOOPBACK: Final = "127.0.0.1"
LOWEST_FREE_PORT: Final = 10_000
USUAL_EPHEMERAL_START: Final = 32_768
_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES: Final = 2_000


def is_free(port: int) -> bool:
    """Returns whether a loopback port is free."""
    with socket.socket() as probe:
        # SO_REUSEADDR ignores connections in TIME_WAIT; bind still fails if there is a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


class PortChooser:
    """Chooses ports and keeps other choosers on this machine from them until `release`."""

    def __init__(self, rng: random.Random) -> None:
        """Holds no port yet.

        Args:
            rng: Source of the first port to try.
        """
        self._rng = rng
        self._locks: list[socket.socket] = []

    def choose(self, names: list[str], wanted: Mapping[str, int], preferred: Mapping[str, int]) -> dict[str, int]:
        """Chooses distinct free ports and holds them.

        Args:
            names: Names of the ports.
            wanted: Requested ports, by name; an error if one is in use.
            preferred: Ports to use if free, such as the last start's ports or the defaults.

        Raises:
            PortInUseError: if a wanted port is taken; every such port is named.
        """
        chosen: dict[str, int] = {}
        taken: list[str] = []
        for name in sorted(names, key=lambda each: each not in wanted):
            port = wanted.get(name) or preferred.get(name)
            if port is not None and self._take(port):
                chosen[name] = port
            elif name in wanted:
                taken.append(f"{name}={port}")
            else:
                chosen[name] = self._take_any(besides=set(wanted.values()))
        if taken:
            raise PortInUseError(
                f"Port in use: {', '.join(taken)}. Choose another with --port NAME=NUMBER, or omit the option to get a free one."
            )
        return {name: chosen[name] for name in names}

    def release(self) -> None:
        """Lets others choose the ports."""
        while self._locks:
            self._locks.pop().close()

    def _take(self, port: int) -> bool:
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            lock.bind((LOOPBACK, port))
        except OSError:
            lock.close()
            return False
        # Looked at with the lock held: another holder may have begun to listen and ended.
        if not is_free(port):
            lock.close()
            return False
        self._locks.append(lock)
        return True

    def _take_any(self, *, besides: set[int]) -> int:
        highest = _ephemeral_start() - 1
        lowest = LOWEST_FREE_PORT if highest > LOWEST_FREE_PORT + _TRIES else 1_024
        for _ in range(_TRIES):
            port = self._rng.randint(lowest, highest)
            if port not in besides and self._take(port):
                return port
        raise PortInUseError(f"No free port between {lowest} and {highest}.")


def choose_ports(
    names: list[str], wanted: Mapping[str, int], preferred: Mapping[str, int], *, rng: random.Random
) -> dict[str, int]:
    """Chooses distinct free ports as `PortChooser.choose`, and holds none of them."""
    chooser = PortChooser(rng)
    try:
        return chooser.choose(names, wanted, preferred)
    finally:
        chooser.release()


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return USUAL_EPHEMERAL_START
