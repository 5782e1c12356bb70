"""Measures the load of the machine.

In a container (cgroup v2), CPU is relative to the container's quota, and memory excludes the reclaimable file cache.
Elsewhere, CPU is the machine's, and memory is that of the runner and its descendants. GPUs are read through
`nvidia-ml-py` if it is installed and a driver is present.
"""

import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import structlog

from fulmen_runner.slots.load import GpuLoad, Load

CGROUP = Path("/sys/fs/cgroup")
MAX_GPUS = 64

_log = structlog.get_logger()


class Machine:
    """The machine or container that the runner is on. Rates are relative to the previous measurement."""

    def __init__(self, *, cgroup: Path = CGROUP, clock: Callable[[], float] = time.monotonic) -> None:
        self._cgroup = cgroup
        self._clock = clock
        self._gpus = Gpus()
        self._cpu_s = self._used_cpu_s()
        self._measured_at = clock()
        psutil.cpu_percent(interval=None)

    def measure(self) -> Load:
        """Returns a load sample."""
        memory_bytes, memory_limit_bytes = self._memory()
        return Load(
            cpu=min(1.0, max(0.0, self._cpu())),
            memory_bytes=memory_bytes,
            memory_limit_bytes=memory_limit_bytes,
            gpus=self._gpus.measure(),
        )

    def _cpu(self) -> float:
        used_s, now = self._used_cpu_s(), self._clock()
        if used_s is None or self._cpu_s is None:
            return psutil.cpu_percent(interval=None) / 100
        share = (used_s - self._cpu_s) / max(1e-6, now - self._measured_at) / self._allowed_cpus()
        self._cpu_s, self._measured_at = used_s, now
        return share

    def _used_cpu_s(self) -> float | None:
        """Returns the container's CPU time in seconds; None outside a container."""
        if not (self._cgroup / "cpu.max").exists():
            return None
        return _field(self._cgroup / "cpu.stat", "usage_usec") / 1e6

    def _allowed_cpus(self) -> float:
        """Returns the number of processors that the container may use."""
        own = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        quota, _, period = _text(self._cgroup / "cpu.max").partition(" ")
        return min(own, int(quota) / int(period)) if quota.isdecimal() and period.isdecimal() else own

    def _memory(self) -> tuple[int, int]:
        machine_bytes = psutil.virtual_memory().total
        used = _text(self._cgroup / "memory.current")
        if not used.isdecimal():
            return _resident_bytes(), machine_bytes
        limit = _text(self._cgroup / "memory.max")
        droppable = _field(self._cgroup / "memory.stat", "inactive_file")
        return max(0, int(used) - droppable), min(machine_bytes, int(limit)) if limit.isdecimal() else machine_bytes


class Gpus:
    """The GPUs known to NVIDIA's management library; none without it."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            _log.debug("no_gpus", reason=str(error))
            return
        self._nvml = nvml

    def measure(self) -> Sequence[GpuLoad]:
        """Returns the load of each GPU that answers."""
        if self._nvml is None:
            return ()
        try:
            count = min(MAX_GPUS, self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError:
            return ()
        return [load for index in range(count) if (load := self._one(index)) is not None]

    def _one(self, index: int) -> GpuLoad | None:
        nvml = self._nvml
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            name = nvml.nvmlDeviceGetName(device)
        except nvml.NVMLError:
            return None
        try:
            percent = nvml.nvmlDeviceGetUtilizationRates(device).gpu
        except nvml.NVMLError:
            percent = 0  # Not available for a partitioned GPU (MIG).
        return GpuLoad(
            model=name if isinstance(name, str) else name.decode(),
            utilization=min(1.0, percent / 100),
            memory_bytes=memory.used,
            memory_limit_bytes=memory.total,
        )


def _resident_bytes() -> int:
    """Returns the resident memory of this process and its descendants."""
    own = psutil.Process()
    total: int = own.memory_info().rss
    try:
        children = own.children(recursive=True)
    except psutil.Error:
        return total
    for child in children:
        try:
            total += child.memory_info().rss
        except psutil.Error:
            continue
    return total


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _field(path: Path, name: str) -> int:
    """Returns a value from a file of `name number` lines; 0 if absent."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0
