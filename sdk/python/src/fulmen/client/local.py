"""`fulmen.local`: a stack for a test or a notebook."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from fulmen.client.sync.client import Client
from fulmen.connection import start_local_stack

__all__ = ["local"]


@contextmanager
def local(
    state_dir: str | PathLike[str] | None = None,
    *,
    runners: int = 1,
    slots: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Client]:
    """Starts the four services and their database for the duration of a block; yields a client for them.

    It uses free ports, so that any number of stacks can run side by side, and ends with this process at the latest.

    >>> import fulmen
    >>> with fulmen.local() as client:  # doctest: +SKIP
    ...     client.queue().runner_count
    1

    Args:
        state_dir: where its state is kept; None for a temporary directory that is deleted at the end. The path must
            be short, because it contains a socket of the database.
        runners: number of runner processes.
        slots: concurrent attempts of each runner; None for its own setting.
        environment: further settings of the services, such as `FULMEN_ALGORITHM_MODULES`.

    Raises:
        LocalStackMissing: if the stack is not installed.
        Exception: if it does not start; the message has the reason.
    """
    folder = Path(tempfile.mkdtemp(prefix="fulmen-")) if state_dir is None else Path(state_dir).resolve()
    try:
        with (
            start_local_stack(folder, runners=runners, slots=slots, environment=dict(environment or {})),
            Client(state_dir=folder) as client,
        ):
            yield client
    finally:
        if state_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
