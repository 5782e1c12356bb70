"""How busy the runner's machine is."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """One GPU.

    Attributes:
        utilization: share of time in which it worked, 0 to 1.
        memory_limit_bytes: the memory that it has.
    """

    model: str
    utilization: float
    memory_bytes: int
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLoad:
    """Places for attempts.

    Attributes:
        configured: the most that the settings allow.
        in_use: by attempts that run, and by what ended ones left running.
        limit: how many may be in use now.
        automatic: whether the runner decides the limit itself.
    """

    configured: int
    in_use: int
    limit: int
    automatic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A measurement.

    Attributes:
        cpu: share of the processors that the runner may use, 0 to 1.
        memory_bytes: in use by the runner and its agents.
        memory_limit_bytes: what they may use; 0 if that is not known.
    """

    cpu: float
    memory_bytes: int
    memory_limit_bytes: int
    gpus: Sequence[GpuLoad] = ()
    slots: SlotLoad | None = None
