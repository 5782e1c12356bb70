"""The state of a run when its turn ends, for requests that arrive in the meantime."""

import asyncio
from dataclasses import dataclass, field, replace

from fulmen_algorithm.runs.collapse import RewardCollapsed
from fulmen_algorithm.runs.control import Interrupted, RunControl
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.runs.worker import RunWorker
from tests.support.algorithm.run_service import WAIT_S, Service, created, until, working


@dataclass
class SlowEnd:
    """An executor whose first turn waits at its end for the test; further turns just end."""

    error: Exception | None = None
    """By which the first turn ends; None: it ends when it is told to."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    turns: int = 0
    cancelling: asyncio.Event = field(default_factory=asyncio.Event)
    may_cancel: asyncio.Event = field(default_factory=asyncio.Event)

    async def execute(self, entry: Entry, control: RunControl) -> None:
        self.turns += 1
        if self.turns > 1:
            return
        try:
            await control.unless_stopped(asyncio.Event().wait() if self.error is None else asyncio.sleep(0))
        except Interrupted:
            self.ending.set()
            await self.go_on.wait()  # as a checkpoint is written
            raise
        self.ending.set()
        await self.go_on.wait()  # as a trainer is closed
        if self.error is not None:
            raise self.error

    def hand_over(self, entry: Entry) -> None:
        raise AssertionError("no other service takes runs over")

    async def cancel_rollouts(self, entry: Entry) -> None:
        self.cancelling.set()
        await self.may_cancel.wait()


def with_executor(service: Service, executor: SlowEnd) -> Service:
    """Gives the runs of a service to another executor."""
    return replace(service, worker=RunWorker(service.runs, executor, service.ownership))


async def test_a_pause_that_is_rolled_back_while_the_checkpoint_is_written_is_no_pause(world, sft_draft, open_service):
    run, executor = await created(sft_draft, world), SlowEnd()
    executor.may_cancel.set()
    async with working(with_executor(open_service(world), executor)) as service:
        service.runs.add(run)
        await until(service, run.name, RunState.RUNNING)
        service.runs.pause(run.name)
        await executor.ending.wait()
        assert service.runs.resume(run.name).state is RunState.RUNNING
        executor.go_on.set()
        done = await service.finish(run)
        states = [e.run.state async for e in service.runs.entry(run.name).events.follow(0) if e.run is not None]
    assert (done.state, executor.turns) == (RunState.SUCCEEDED, 2)
    assert RunState.PAUSED not in states


async def test_a_run_whose_reward_collapsed_while_it_was_paused_is_paused(world, sft_draft, open_service):
    run = await created(sft_draft, world)
    executor = SlowEnd(error=RewardCollapsed("The reward collapsed.", sequence=1, step=0))
    executor.may_cancel.set()
    async with working(with_executor(open_service(world), executor)) as service:
        service.runs.add(run)
        await executor.ending.wait()
        assert service.runs.pause(run.name).state is RunState.RUNNING
        executor.go_on.set()
        paused = await until(service, run.name, RunState.PAUSED)
        assert (paused.branch_points, paused.collapses, executor.turns) == ((1,), 1, 1)
        service.runs.resume(run.name)
        done = await service.finish(run)
    assert (done.state, done.branch_points) == (RunState.SUCCEEDED, (1,))


async def test_a_drain_waits_until_a_cancelled_run_is_one(world, sft_draft, open_service):
    run, executor = await created(sft_draft, world), SlowEnd()
    async with working(with_executor(open_service(world), executor)) as service:
        service.runs.add(run)
        await until(service, run.name, RunState.RUNNING)
        cancelled = asyncio.create_task(service.worker.cancel(run.name))
        await executor.cancelling.wait()
        draining = asyncio.create_task(service.worker.drain())
        for _ in range(5):
            await asyncio.sleep(0)
        executor.may_cancel.set()
        async with asyncio.timeout(WAIT_S):
            await draining
        # The roles are cancelled right after the drain.
        state = service.runs.entry(run.name).run.state
        assert (await cancelled).state is RunState.CANCELLED
    assert state is RunState.CANCELLED
