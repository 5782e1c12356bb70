"""Transfers of files in chunks: how many at the same time, how fast, and what is counted of them.

The rate is the same as for a project's other calls (`project_limits`), but counted separately: an upload delays no
other call.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from opentelemetry import metrics

from fulmen.errors import QuotaExceeded, RunStorageUnavailable
from fulmen.ids import ALL_PROJECTS
from fulmen_algorithm.training.files import is_storage_trouble
from fulmen_service_kit.security.project_limits import MAX_PROJECTS, ProjectLimits, ProjectShare
from fulmen_service_kit.security.tokens import Caller

CHUNK_BYTES: Final = 2**20
_RETRY_S: Final = 1.0
_THREADS: Final = 4
_READERS: Final = 2

Result = TypeVar("Result")


class Transfers:
    """The open transfers of all projects. Used on one event loop."""

    def __init__(self, limits: ProjectLimits, *, max_open: int) -> None:
        """`max_open` is the maximum number of transfers of a project at the same time."""
        self._limits = limits
        self._max_open = max_open
        self._open: Counter[str] = Counter()
        self._shares: OrderedDict[str, ProjectShare] = OrderedDict()
        # Separate threads: slow disks do not delay other work, and readers of gigabytes do not delay chunks.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="weights-reader")
        meter = metrics.get_meter("fulmen.algorithm")
        self._bytes = meter.create_counter(
            "fulmen.algorithm.weights.bytes", unit="By", description="Bytes of weights received and sent."
        )
        self._models = meter.create_counter(
            "fulmen.algorithm.weights.models", description="Models committed, deleted and damaged in transfer."
        )
        for direction in ("upload", "download"):
            self._bytes.add(0, {"direction": direction})
        for event in ("committed", "deleted", "damaged"):
            self._models.add(0, {"event": event})

    def close(self) -> None:
        """Waits for what is being written."""
        self._threads.shutdown()
        self._readers.shutdown()

    def happened(self, event: str) -> None:
        """Counts a model that was committed or deleted, or whose file was damaged."""
        self._models.add(1, {"event": event})

    @contextmanager
    def begin(self, caller: Caller) -> Iterator["Transfer"]:
        """Begins a transfer of the caller's project. Tokens for all projects, which services have, are not limited.

        Raises:
            QuotaExceeded: if the project has too many.
        """
        project = caller.project
        if project == ALL_PROJECTS:
            yield Transfer(None, self._bytes)
            return
        if self._open[project] >= self._max_open:
            raise QuotaExceeded(
                f"{project} has {self._max_open} transfers at the same time, which is the maximum "
                "(max_transfers). Retry after the delay.",
                retry_after_s=_RETRY_S,
                project=project,
                quota="transfers",
            )
        self._open[project] += 1
        try:
            yield Transfer(self._share(project), self._bytes)
        finally:
            self._open[project] -= 1
            if not self._open[project]:
                del self._open[project]

    def _share(self, project: str) -> ProjectShare:
        share = self._shares.setdefault(project, ProjectShare(self._limits, project))
        self._shares.move_to_end(project)
        while len(self._shares) > MAX_PROJECTS:
            self._shares.popitem(last=False)
        return share

    async def blocking(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Runs what blocks for a moment, in a thread.

        Raises:
            RunStorageUnavailable: if the storage is full or cannot be reached.
        """
        with storage_errors():
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))

    async def reading(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Runs what reads whole files, in a thread; see `blocking`."""
        with storage_errors():
            return await asyncio.get_running_loop().run_in_executor(self._readers, partial(work, *arguments))

    def later(self, work: Callable[[], None]) -> None:
        """Runs what must happen, such as closing a file, in a thread, and does not wait for it."""
        self._threads.submit(work)


class Transfer:
    """One transfer."""

    def __init__(self, share: ProjectShare | None, counter: metrics.Counter) -> None:
        self._share = share
        self._bytes = counter

    async def moved(self, size_bytes: int, direction: str) -> None:
        """Counts bytes of an `upload` or a `download`; waits while the project is faster than its rate."""
        self._bytes.add(size_bytes, {"direction": direction})
        if self._share is not None:
            self._share.charge(size_bytes, messages=1)
            await self._share.pace()


@contextmanager
def storage_errors() -> Iterator[None]:
    """Translates errors of the storage into errors of the service."""
    try:
        yield
    except OSError as error:
        if not is_storage_trouble(error):
            raise
        raise RunStorageUnavailable("The storage of models is full or cannot be reached.") from error
