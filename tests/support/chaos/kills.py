"""Ends parts of a stack as an accident would, in the middle of their work, and starts them again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import psutil

from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_service_pb2
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.module_processes import ENGINE, processes_of
from tests.support.algorithm.runs import eventually

__all__ = ["Victim", "kill_in_mid_work", "restart_in_mid_work", "work_is_under_way"]


STOP_LIMIT_S = 60.0


class Victim(StrEnum):
    """What can die; the values that are names of services are the stack's own."""

    RUNNER = "runner-1"
    PROXY = "llm_proxy"
    STORE = "store"
    ALGORITHM = "algorithm"
    DATABASE = "database"
    ENGINE = "engine"


# Those that the queue can be asked about while they are held still: the kill then surely finds them at work.
_HOLDABLE = frozenset({Victim.RUNNER, Victim.PROXY})


async def work_is_under_way(client: Services, run: str) -> bool:
    """True if rollouts of a run are leased now."""
    stats = await client.rollouts.GetQueueStats(rollout_service_pb2.GetQueueStatsRequest(training_run=run))
    return bool(stats.running_count)


async def kill_in_mid_work(stack: LocalStack, client: Services, run: str, victim: Victim) -> None:
    """Kills (SIGKILL) a part of the stack while rollouts of a run are under way, and starts it again.

    Raises:
        AssertionError: if no rollout gets under way.
        ServiceFailedError: if what was killed does not start again.
    """

    async def caught() -> bool:
        if victim not in _HOLDABLE:
            return await work_is_under_way(client, run)
        with _held(stack.process(victim.value).pid) as hold:
            if not await work_is_under_way(client, run):
                return False
            await stack.kill_service(victim.value)
            hold.clear()
            return True

    await eventually(caught, what=f"{victim} is caught at work on {run}")
    match victim:
        case Victim.DATABASE:
            await stack.kill_database()
            await stack.check_database()
        case Victim.ENGINE:
            engine = await eventually(_engine, what="an engine runs")
            engine.kill()
        case Victim.RUNNER | Victim.PROXY:
            await stack.start_service(victim.value)
        case _:
            await stack.kill_service(victim.value)
            await stack.start_service(victim.value)


async def restart_in_mid_work(stack: LocalStack, client: Services, run: str, service: Victim) -> None:
    """Stops a service as an upgrade does (SIGTERM) while rollouts of a run are under way, and starts it again.

    Raises:
        AssertionError: if no rollout gets under way, or the service does not end by itself with status 0.
        ServiceFailedError: if it does not start again.
    """

    async def under_way() -> bool:
        return await work_is_under_way(client, run)

    await eventually(under_way, what=f"{service} is at work on {run}")
    process = stack.process(service.value)
    await stack.stop_service(service.value, grace_s=STOP_LIMIT_S)
    status = await process.wait()
    assert status == 0, f"{service} ended with status {status}"
    await stack.start_service(service.value)


@contextmanager
def _held(pid: int) -> Iterator[set[int]]:
    """Holds a process still; lets it go on in the end, unless the yielded set was emptied."""
    held = {pid}
    os.kill(pid, signal.SIGSTOP)
    try:
        yield held
    finally:
        for each in held:
            os.kill(each, signal.SIGCONT)


async def _engine() -> psutil.Process | None:
    return next(iter(processes_of(ENGINE)), None)
