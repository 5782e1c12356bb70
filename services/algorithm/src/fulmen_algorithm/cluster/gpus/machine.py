"""The GPUs of the service's machine: which there are, and how a process is shown some of them and no others.

A GPU's number is its place among those that the service sees; `CUDA_VISIBLE_DEVICES` of what it starts has their own names.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE
from typing import Protocol

import structlog

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
ORDER = "PCI_BUS_ID"
"""The order of nvidia-smi, in which CUDA counts by itself only where all GPUs are alike."""
ANSWER_DEADLINE_S = 30.0
QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU.

    Attributes:
        name: Its model.
        memory_bytes: Its memory, in bytes; 0 if unknown.
    """

    name: str
    memory_bytes: int


class GpuProbe(Protocol):
    """Knows the GPUs of this machine."""

    async def gpus(self) -> Mapping[int, Gpu]:
        """Returns the GPUs that runs may use, by number; none if they are unknown."""


class NvidiaSmi:
    """See `GpuProbe`: asks the program `nvidia-smi`."""

    def __init__(self, *, program: str = "nvidia-smi", device: str = "cuda") -> None:
        """Asks nothing yet; a `device` such as `cuda:1` leaves that GPU alone."""
        self._program = program
        self._device = device

    async def gpus(self) -> Mapping[int, Gpu]:
        """See `GpuProbe`."""
        found = seen(await self._answer(), os.environ.get(VARIABLE))
        _, _, number = self._device.partition(":")
        return {int(number): found[int(number)]} if number and int(number) in found else found

    async def _answer(self) -> str:
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                asked = await asyncio.create_subprocess_exec(
                    self._program, *QUERY, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
                )
                try:
                    output, _ = await asked.communicate()
                finally:
                    if asked.returncode is None:
                        asked.kill()
        except OSError as error:  # a TimeoutError is one
            _log.warning("gpus_unknown", program=self._program, reason=type(error).__name__)
            return ""
        return output.decode(errors="replace") if asked.returncode == 0 else ""


def seen(listing: str, visible: str | None) -> dict[int, Gpu]:
    """Returns the GPUs of a listing of `nvidia-smi` that a process sees, by number.

    Args:
        listing: Its answer to `QUERY`.
        visible: Value of `CUDA_VISIBLE_DEVICES`; None if it is not set.
    """
    by_name: dict[str, Gpu] = {}
    for line in listing.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 4 or not parts[0].isdecimal():
            continue
        memory = int(parts[3]) * 2**20 if parts[3].isdecimal() else 0
        by_name[parts[0]] = by_name[parts[1]] = Gpu(name=parts[2], memory_bytes=memory)
    if visible is None:
        return {int(name): gpu for name, gpu in by_name.items() if name.isdecimal()}
    # A part of a GPU (MIG) is not listed by itself.
    return {number: by_name.get(name, Gpu(name=name, memory_bytes=0)) for number, name in enumerate(_names(visible))}


def shown_to(gpus: Sequence[int], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of a process that sees some GPUs and no others, in their order; none if none are named.

    Args:
        gpus: Numbers of the GPUs.
        environment: That of this process.
    """
    if not gpus:
        return {}
    visible = environment.get(VARIABLE)
    names = None if visible is None else _names(visible)
    own = [str(gpu) if names is None or gpu >= len(names) else names[gpu] for gpu in gpus]
    return {VARIABLE: ",".join(own), ORDER_VARIABLE: environment.get(ORDER_VARIABLE, ORDER)}


def _names(visible: str) -> list[str]:
    return [name.strip() for name in visible.split(",") if name.strip()]
