"""The way out of a collective whose other ranks are lost.

A collective of Gloo that waits for a machine that is silent waits for its timeout, and nothing interrupts it. So a thread of
its own waits in it, and the rank's thread for either: the end of the collective, or the word that ranks are lost. The rank
then still has its weights and can hand them over.

Invariant: the ranks of a copy of the weights leave at the same collective, whatever each of them has seen of it. So none of
them waits for another one that has left.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

Result = TypeVar("Result")
Agree = Callable[[bool], bool]
"""Tells the ranks of a copy, all of which call it, whether any of them leaves."""


class RanksLost(Exception):
    """Other ranks are lost, and a collective with them was left. What it was to change may be changed in part."""


class WayOut:
    """The way out of the collectives of one group."""

    def __init__(self, left: Future[None]) -> None:
        """`left` is set, by another thread, when ranks are lost."""
        self._left = left
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collectives")
        self.agree: Agree = bool

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
        running: Future[Result] = self._thread.submit(collective)
        either: set[Future[Any]] = {running, self._left}
        wait(either, return_when=FIRST_COMPLETED)
        failed = self._left.done() or isinstance(running.exception(), RuntimeError)
        if self.agree(failed):
            raise RanksLost("Ranks are lost.")
        return running.result()
