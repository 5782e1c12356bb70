"""Chooses TCP ports for the services: the well-known one if it is free, otherwise a free one.

Free ports are taken from below the range that the kernel gives to outgoing connections, so that a service that
restarts a minute later still finds its port free.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fulmen_cli.local.errors import PortInUseError

__all__ = ["DEFAULT_PORTS", "choose_ports", "is_free"]

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


def choose_ports(
    names: list[str], wanted: Mapping[str, int], preferred: Mapping[str, int], *, rng: random.Random
) -> dict[str, int]:
    """Chooses distinct free ports.

    Args:
        names: Names of the ports.
        wanted: Requested ports, by name; an error if one is in use.
        preferred: Ports to use if free, such as those of the last start or the defaults.
        rng: Source of the first port to try.

    Raises:
        PortInUseError: if a wanted port is taken; every such port is named.
    """
    chosen: dict[str, int] = {}
    taken: list[str] = []
    for name in sorted(names, key=lambda each: each not in wanted):
        port = wanted.get(name) or preferred.get(name)
        if port is not None and port not in chosen.values() and is_free(port):
            chosen[name] = port
        elif name in wanted:
            taken.append(f"{name}={port}")
        else:
            chosen[name] = _find_free(rng, besides=set(chosen.values()) | set(wanted.values()))
    if taken:
        raise PortInUseError(
            f"Port in use: {', '.join(taken)}. Choose another with --port NAME=NUMBER, or omit the option to get a free one."
        )
    return {name: chosen[name] for name in names}


def _find_free(rng: random.Random, *, besides: set[int]) -> int:
    highest = _ephemeral_start() - 1
    lowest = LOWEST_FREE_PORT if highest > LOWEST_FREE_PORT + _TRIES else 1_024
    for _ in range(_TRIES):
        port = rng.randint(lowest, highest)
        if port not in besides and is_free(port):
            return port
    raise PortInUseError(f"No free port between {lowest} and {highest}.")


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return USUAL_EPHEMERAL_START
