"""Free ports for the processes that tests start."""

from __future__ import annotations

import random

from fulmen_cli.local.ports import choose_ports

__all__ = ["free_ports"]


def free_ports(count: int = 1) -> list[int]:
    """Returns so many distinct ports that are free now, and that are not given to outgoing connections."""
    names = [str(number) for number in range(count)]
    return list(choose_ports(names, {}, {}, rng=random.Random()).values())
