"""Which cells the crash matrix has: who is harmed, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CLOCK", "DISK", "FULL", "HELD", "SHORT", "Cell", "Fault", "Victim"]


class Victim(StrEnum):
    """A process of a stack; the values of services are their names in its record."""

    STORE = "store"
    PROXY = "llm_proxy"
    RUNNER = "runner-1"
    ALGORITHM = "algorithm"
    ENGINE = "engine"
    AGGREGATOR = "aggregator"
    POSTMASTER = "postmaster"
    BACKEND = "backend"
    SUPERVISOR = "supervisor"
    KEEPER = "keeper"


class Fault(StrEnum):
    """What happens to it."""

    NONE = "none"
    KILL = "kill"
    TWICE = "twice"
    TERM = "term"
    STOP = "stop"
    DROP = "drop"
    RESET = "reset"
    CLOCK_AHEAD = "clock+1h"
    CLOCK_BEHIND = "clock-1h"
    DISK = "disk"
    MEMORY = "memory"


CLOCK = frozenset({Fault.CLOCK_AHEAD, Fault.CLOCK_BEHIND})
"""Faults that need a stack whose processes have clocks of their own."""
DISK = frozenset({Fault.DISK})
"""Faults that need a stack whose folders have file systems of their own."""
HELD = frozenset({Fault.STOP, Fault.DROP, Fault.MEMORY, *CLOCK, *DISK})
"""Faults that last; the others are over at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell: victims that suffer the same fault at the same time."""

    victims: tuple[Victim, ...]
    fault: Fault

    @property
    def key(self) -> str:
        """Its name, `store+llm_proxy/kill`."""
        return f"{'+'.join(self.victims)}/{self.fault}"

    @property
    def stack(self) -> str:
        """The kind of stack that it needs: `plain`, `clock` or `disk`."""
        return "clock" if self.fault in CLOCK else "disk" if self.fault in DISK else "plain"


_SIGNALS = (Fault.NONE, Fault.KILL, Fault.TWICE, Fault.TERM, Fault.STOP)
_NETWORK = (Fault.DROP, Fault.RESET)
_CLOCKS = (Fault.CLOCK_AHEAD, Fault.CLOCK_BEHIND)
_FAULTS: dict[Victim, tuple[Fault, ...]] = {
    Victim.STORE: (*_SIGNALS, *_NETWORK, Fault.MEMORY, *_CLOCKS),
    Victim.PROXY: (*_SIGNALS, *_NETWORK, Fault.MEMORY, *_CLOCKS, Fault.DISK),
    Victim.RUNNER: (*_SIGNALS, *_NETWORK, Fault.MEMORY, *_CLOCKS),
    Victim.ALGORITHM: (*_SIGNALS, *_NETWORK, Fault.MEMORY, *_CLOCKS, Fault.DISK),
    Victim.ENGINE: (*_SIGNALS, *_NETWORK, Fault.MEMORY, Fault.CLOCK_AHEAD),
    Victim.AGGREGATOR: (*_SIGNALS, *_NETWORK, Fault.MEMORY),
    # PostgreSQL listens on a Unix socket: there is no network between it and the store.
    # Its disk is that of the record and the logs too.
    Victim.POSTMASTER: (*_SIGNALS, Fault.MEMORY, Fault.DISK),
    Victim.BACKEND: (Fault.KILL, Fault.TWICE, Fault.TERM, Fault.STOP, Fault.MEMORY),
    # Its clock is PostgreSQL's too: the server is its child.
    Victim.SUPERVISOR: (*_SIGNALS, Fault.MEMORY, *_CLOCKS),
    Victim.KEEPER: (*_SIGNALS, Fault.MEMORY),
}
_TOGETHER: tuple[tuple[tuple[Victim, ...], Fault], ...] = (
    ((Victim.STORE, Victim.PROXY), Fault.KILL),
    ((Victim.STORE, Victim.PROXY), Fault.STOP),
    ((Victim.STORE, Victim.PROXY), Fault.DROP),
    ((Victim.POSTMASTER, Victim.STORE), Fault.KILL),
    ((Victim.POSTMASTER, Victim.STORE), Fault.STOP),
    ((Victim.ALGORITHM, Victim.RUNNER), Fault.KILL),
    ((Victim.ALGORITHM, Victim.STORE), Fault.KILL),
    ((Victim.ENGINE, Victim.PROXY), Fault.KILL),
    ((Victim.STORE, Victim.RUNNER), Fault.KILL),
    ((Victim.POSTMASTER, Victim.ALGORITHM), Fault.KILL),
)


def _ordered(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Sorts cells so that those of one kind of stack follow each other, harmless ones first."""
    kinds = ("plain", "clock", "disk")
    return tuple(sorted(cells, key=lambda cell: kinds.index(cell.stack)))


FULL = _ordered(
    [Cell(victims=(victim,), fault=fault) for victim, faults in _FAULTS.items() for fault in faults]
    + [Cell(victims=victims, fault=fault) for victims, fault in _TOGETHER]
)
SHORT = tuple(
    Cell(victims=victims, fault=fault)
    for victims, fault in (
        ((Victim.RUNNER,), Fault.KILL),
        ((Victim.STORE, Victim.PROXY), Fault.KILL),
    )
)
"""What the gate runs: one cell of each kind."""
