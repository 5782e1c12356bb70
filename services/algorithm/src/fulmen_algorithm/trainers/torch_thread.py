"""All torch work of the service runs in one thread, so that the event loop is never held and nothing runs twice."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TorchThread:
    """One worker thread; work is done in the order in which it is asked for."""

    def __init__(self, *, torch_threads: int) -> None:
        """Starts no thread yet; `torch_threads` is what torch itself may use inside an operation."""
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="torch", initializer=torch.set_num_threads, initargs=(torch_threads,)
        )

    async def run(
        self, work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Runs a function in the thread; a cancelled caller leaves it running to its end."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(work, *args, **kwargs))

    def soon(self, work: Callable[[], None]) -> None:
        """Runs a function in the thread, and does not wait for it."""
        self._executor.submit(work)

    def close(self) -> None:
        """Waits for the current call and drops queued ones."""
        self._executor.shutdown(wait=True, cancel_futures=True)
