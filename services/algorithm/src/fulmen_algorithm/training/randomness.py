"""Random numbers of a trainer: torch has one generator per device and process, and several runs train in one process.

Only torch draws numbers here (initial adapters and dropout); shuffling has separate generators.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class OwnRandomness:
    """The state of one trainer's generators.

    Invariant: a trainer's random numbers depend only on its seed and its earlier draws.
    """

    def __init__(self, seed: int) -> None:
        """Initializes the generators with a seed, without drawing or touching other generators."""
        outside = generators()
        torch.manual_seed(seed)
        self._own = generators()
        set_generators(outside)

    @property
    def state(self) -> Mapping[str, Any]:
        """State of the generators."""
        return self._own

    @state.setter
    def state(self, generators: Mapping[str, Any]) -> None:
        self._own = dict(generators)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Installs the generators in the process within the context."""
        outside = generators()
        set_generators(self._own)
        try:
            yield
        finally:
            self._own = generators()
            set_generators(outside)


def generators() -> dict[str, Any]:
    """Returns the state of the process's generators, of all devices."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def set_generators(saved: Mapping[str, Any]) -> None:
    """Restores the process's generators to a state returned by `generators`."""
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(saved["cuda"])
