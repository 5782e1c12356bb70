"""Rounds that overlap with the backward pass: a bucket is coded and sent while the gradients of the next one are computed.

Gradients come about in the order of the last parameter to the first, so buckets are summed from the last one on, each once
all gradients of its parameters are there. Invariants: all ranks sum the same buckets in the same order, whatever the order
in which their gradients come; one thread calls all collectives, on a process group of its own, so that they never mix with
those of the pass; and a round that meets a gradient that is not finite leaves every state as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist

from fulmen_exchange.policies.settings import FixedPolicy, StagesPolicy
from fulmen_exchange.ranks import Ranks, StepInfo
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.settings import CodecSettings


class OverlappedRounds:
    """The rounds of one rank."""

    def __init__(self, reducer: CodecReducer) -> None:
        """Begins no round yet; the reducer's link must have a group of its own."""
        self._reducer = reducer
        self._names = reducer.names_of_buckets
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange-overlap")
        self._there: set[str] = set()
        self._left: list[int] = []
        self._sums: list[Future[None]] = []

    def begin(self) -> bool:
        """Begins a round before its gradients are ready; see `Exchanger.begin`."""
        self._there.clear()
        self._left = list(range(len(self._names)))
        return self._reducer.begin()

    def add(self, names: Iterable[str], prepare: Callable[[], None]) -> None:
        """Reports that gradients are ready, and sums the buckets that are now complete.

        Args:
            names: Names of their parameters.
            prepare: Is called before, in the thread that sums.
        """
        self._there.update(names)
        self._sums.append(self._thread.submit(_without_gradients, prepare))
        while self._left and self._names[self._left[-1]] <= self._there:
            self._sum(self._left.pop())

    def complete(self, step_info: StepInfo) -> None:
        """Sums what is left, waits for all sums, and completes the round; see `CodecReducer.complete`.

        Raises:
            RanksDiverged: if the ranks no longer hold the same weights.
        """
        while self._left:
            self._sum(self._left.pop())
        for sum_ in self._sums:
            sum_.result()
        self._sums.clear()
        self._reducer.complete(step_info)

    def _sum(self, bucket: int) -> None:
        self._sums.append(self._thread.submit(_without_gradients, lambda: self._reducer.add(bucket)))


def _without_gradients(work: Callable[[], None]) -> None:
    with torch.no_grad():
        work()


def apart(ranks: Ranks) -> Ranks:
    """Returns the same ranks with a separate process group, which all of them create at the same time."""
    if ranks.group is None:
        return ranks
    members = dist.get_process_group_ranks(ranks.group)
    backend = ranks.group._get_backend(ranks.device)
    group = dist.new_group(members, timeout=backend.options._timeout, use_local_synchronization=True)
    return replace(ranks, group=group)


def overlap_problems(settings: CodecSettings, device: torch.device) -> list[str]:
    """Returns why rounds cannot overlap with the backward pass; empty if they can."""
    found = []
    if device.type != "cpu":
        found.append("overlap: gradients must be on the CPU; on a GPU sums begin after the backward pass")
    if not isinstance(settings.policy, FixedPolicy | StagesPolicy):
        found.append(
            "overlap: the policy must be fixed or stages, since other policies depend on measured times, which the overlap would hide"
        )
    return found
