"""Load of the runner's machine, sampled in a thread."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

INTERVAL_S = 5.0
FIRST_SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """Load of one GPU.

    Attributes:
        model: Product name.
        utilization: Share of time in use, 0 to 1.
        memory_bytes: Memory in use.
        memory_limit_bytes: Memory of the device.
    """

    model: str
    utilization: float
    memory_bytes: int
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLoad:
    """Slots of the runner.

    Attributes:
        configured: Largest number that the settings allow.
        in_use: Slots held by running attempts and stragglers.
        limit: Current number.
        automatic: Whether the runner decides the number.
    """

    configured: int
    in_use: int
    limit: int
    automatic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load sample.

    Attributes:
        cpu: CPU utilization of the processors that the runner may use, 0 to 1.
        memory_bytes: Memory used by the runner and its agents.
        memory_limit_bytes: Memory that they may use; 0 if unknown.
        gpus: Load of each GPU.
        slots: Set when the sample is sent.
    """

    cpu: float
    memory_bytes: int
    memory_limit_bytes: int
    gpus: Sequence[GpuLoad] = ()
    slots: SlotLoad | None = None


class LoadMeter:
    """Background role: samples the load every few seconds; `latest` is None until the first sample."""

    def __init__(self, measure: Callable[[], Load], *, interval_s: float = INTERVAL_S) -> None:
        self.latest: Load | None = None
        self._measure = measure
        self._interval_s = interval_s

    async def run(self) -> None:
        """Samples until cancelled."""
        loop = asyncio.get_running_loop()
        # Its own thread: a GPU driver may hang.
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load-meter")
        try:
            # A rate needs some time to be meaningful.
            await asyncio.sleep(min(FIRST_SAMPLE_S, self._interval_s))
            while True:
                self.latest = await loop.run_in_executor(executor, self._measure)
                await asyncio.sleep(self._interval_s)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
