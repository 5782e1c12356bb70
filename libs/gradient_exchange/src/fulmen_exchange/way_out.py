"""The way out of a collective whose other ranks are lost.

A collective of Gloo that waits for a machine that is silent waits for its timeout, and nothing interrupts it. So a thread of
its own waits in it, and the rank's thread for either: the end of the collective, or the word that ranks are lost. The rank
then still has its weights and can hand them over. On a GPU a collective of NCCL has been started when torch returns, and what
comes after it waits on the GPU. So the thread waits for the GPU, too, and the communicators with ranks that are lost are
aborted (`ProcessGroup.abort`), which ends their kernels. What these have left is never read.

Invariant: the ranks of a copy of the weights leave at the same collective, whatever each of them has seen of it. So none of
them waits for another one that has left.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
Agree = Callable[[bool], bool]
"""Informs the ranks of a copy, all of which call it, whether any of them leaves."""


class RanksLost(Exception):
    """Other ranks are lost, and a collective with them was left. What it was to change may be changed in part."""


class WayOut:
    """The way out of the collectives of one group.

    Attributes:
        agree: Returns whether any rank of this one's copy leaves.
        groups: Groups with ranks of other copies, which may be lost.
    """

    def __init__(self, left: Future[None], *, device: torch.device | None = None) -> None:
        """`left` is set, by another thread, when ranks are lost; `device` is the rank's, by default the CPU."""
        self._left = left
        self._device = device if device is not None and device.type == "cuda" else None
        self._aborted = False
        # A thread has a GPU of its own to begin with: the first.
        on_gpu = None if self._device is None else partial(torch.cuda.set_device, self._device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collectives", initializer=on_gpu)
        self.agree: Agree = bool
        self.groups: list[dist.ProcessGroup] = []

    def check(self) -> None:
        """Leaves if ranks are lost; not between the collectives of a copy.

        Raises:
            RanksLost: if ranks are lost.
        """
        if self._left.done():
            raise RanksLost("Ranks are lost.")

    def run(self, collective: Callable[[], Result]) -> Result:
        """Runs a collective with ranks that may be lost; all ranks of a copy run the same ones.

        Raises:
            RanksLost: if it fails or is left on any rank of the copy.
        """
        running: Future[Result] = self._thread.submit(self._settled, collective)
        either: set[Future[Any]] = {running, self._left}
        wait(either, return_when=FIRST_COMPLETED)
        failed = self._left.done() or isinstance(running.exception(), RuntimeError)
        if failed:
            # Before the ranks of the copy agree: their collective would wait on the GPU behind this one.
            self._abort()
        if self.agree(failed):
            raise RanksLost("Ranks are lost.")
        return running.result()

    def _settled(self, collective: Callable[[], Result]) -> Result:
        result = collective()
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        return result

    def _abort(self) -> None:
        """Ends collectives of NCCL; does nothing to Gloo's (torch 2.13)."""
        if self._aborted:
            return
        self._aborted = True
        nccl: Any = None
        if self._device is not None and self.groups:
            nccl = self.groups[0]._get_backend(self._device)
        # As torch's own `_abort_process_group` does: otherwise one communicator may wait for another.
        if nccl is not None:
            nccl._group_start()
        for group in self.groups:
            group.abort()
        if nccl is not None:
            nccl._group_end()
