"""The real four services over a real PostgreSQL, on free ports and in a folder of their own, for e2e and chaos tests.

Nothing supervises them: a test that kills a service starts it again itself, when it wants to.

    async with running_stack(short_tmp_path) as stack:
        await stack.kill_service("runner-1")
        await stack.start_service("runner-1")
        async with connect(stack_targets(stack), token=stack.client_token) as client:
            ...

Names of services: `store`, `llm_proxy`, `algorithm`, `runner-1` and so on. `stack.kill_database()` and
`stack.check_database()` do the same to PostgreSQL; `stack.log_tail(name)` shows why something failed.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fulmen.rpc.services import Targets
from fulmen_cli.local.ports import choose_ports
from fulmen_cli.local.postgres import EmbeddedPostgres
from fulmen_cli.local.process import ForkableServices
from fulmen_cli.local.record import StackFolder
from fulmen_cli.local.services import PRELOADED, port_names
from fulmen_cli.local.stack import LocalStack, StackSettings
from tests.support.algorithm.warm import fork_server

__all__ = ["own_ports", "running_stack", "stack_targets"]


def own_ports(folder: Path) -> StackFolder:
    """Makes a state folder whose `fulmen up` takes free ports, not the usual ones, which other stacks take as well."""
    made = StackFolder(folder.resolve())
    made.create()
    made.keep_ports(choose_ports(port_names(1), {}, {}, rng=random.Random()))
    return made


@asynccontextmanager
async def running_stack(
    folder: Path,
    *,
    runners: int = 1,
    slots: int | None = None,
    environment: Mapping[str, str] | None = None,
    make: type[LocalStack] = LocalStack,
    forks_alone: bool = False,
) -> AsyncIterator[LocalStack]:
    """Starts everything, yields it, and stops it in the end, even if it never became ready.

    Args:
        folder: where its state goes; a short path (`short_tmp_path`), for PostgreSQL's socket. Used again, it goes on
            with the same database and keys.
        runners: how many runner processes.
        slots: how many attempts each runner runs at once.
        environment: more settings of the services, such as `FULMEN_STORE_LEASE_TTL_S`.
        make: the stack's class.
        forks_alone: whether it forks engines and ranks from a process of its own, as `fulmen up` does, rather than from
            one that all tests of this process use.
    """
    settings = StackSettings(
        state_dir=folder, runners=runners, slots=slots, use_default_ports=False, environment=dict(environment or {})
    )
    # The record makes `fulmen ... --state-dir` work on this stack too, as long as a test holds the folder's lock.
    stack = make(settings, on_change=StackFolder(folder.resolve()).write)
    if not forks_alone:
        stack._forkable = _SharedForks()
    stack.folder.create()
    if not stack.folder.database.exists():
        subprocess.run(["cp", "-a", _new_cluster(), stack.folder.database], check=True)
    with stack.folder.hold():
        try:
            await stack.start()
            yield stack
        finally:
            await stack.stop()


def stack_targets(stack: LocalStack) -> Targets:
    """Returns where the services of a stack listen, for `fulmen.rpc.services.connect`."""
    targets = stack.targets
    return Targets(store=targets["store"], algorithm=targets["algorithm"], llm_proxy=targets["llm_proxy"])


class _SharedForks(ForkableServices):
    """Forks of the process that all stacks of this one use."""

    def __init__(self) -> None:
        super().__init__(PRELOADED, log_file=Path(os.devnull))
        self._server = fork_server()

    def close(self) -> None:
        """Leaves it to others."""


@functools.cache
def _new_cluster() -> Path:
    """Returns the folder of a PostgreSQL in which nothing is yet: to copy it is quicker than `initdb`."""
    place = Path(tempfile.mkdtemp(prefix="fulmen-cluster-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    place.chmod(0o711)
    postgres = EmbeddedPostgres(place / "data")
    postgres.start()
    postgres.stop()
    postgres.log_file.unlink()
    return place / "data"
