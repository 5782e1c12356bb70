"""Waits of a run for its storage: a full disk or an unreachable object store pauses a run and never ends it."""

import asyncio
import errno
from collections.abc import Callable

import structlog

from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.training.files import is_storage_trouble

_log = structlog.get_logger()

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 15.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


async def wait_for_storage(entry: Entry, error: BaseException | None) -> None:
    """Waits until a checkpoint can be written again; looks at least every 15 s.

    Args:
        entry: The run; `waiting_reason` is set meanwhile.
        error: What made it wait.
    """
    full = isinstance(error, OSError) and error.errno in _FULL
    reason = "its storage is full" if full else "its storage cannot be written"
    entry.waiting_reason = f"The run waits because {reason}."
    _log.error("run_waits_for_storage", run=entry.run.name, reason=reason, error=str(error))
    entry.events.notify("warning", f"{entry.waiting_reason} It resumes automatically.")
    wait_s = FIRST_WAIT_S
    try:
        await asyncio.to_thread(entry.files.checkpoint_store().discard_partial)
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)
            try:
                await asyncio.to_thread(entry.files.check_room)
                await entry.files.push()
                break
            except OSError as problem:
                if not is_storage_trouble(problem):
                    raise
    finally:
        entry.waiting_reason = ""
    entry.events.notify("info", "The storage of the run can be written again.")
    _log.info("run_storage_back", run=entry.run.name)


async def stored(entry: Entry, change: Callable[[], object]) -> None:
    """Makes a change of a run's files, once its storage can be written."""
    while True:
        try:
            change()
        except OSError as error:
            if not is_storage_trouble(error):
                raise
            await wait_for_storage(entry, error)
        else:
            return
