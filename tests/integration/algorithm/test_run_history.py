"""What runs measure is at the store within moments, once, and stays there when the service is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import run_history_service_pb2 as pb
from fulmen_algorithm.clients.run_history import StoreRunHistory
from fulmen_algorithm.clients.run_leases import StoreRunLeases
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.history import HistoryDelivery
from fulmen_algorithm.runs.ports import RunRecord
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.rewards import RewardDistribution
from fulmen_algorithm.runs.run import RunState
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.new_run import now, training_run
from tests.support.store.running import StoreHandle, Stubs, running_store

RUN = training_run().name
DEADLINE_S = 20


@asynccontextmanager
async def delivering(runs: RunRegistry, channel: FulmenChannel) -> AsyncIterator[None]:
    """Runs the role until the end of the context."""
    task = asyncio.create_task(HistoryDelivery(runs, StoreRunHistory(channel)).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def recorded(store: StoreHandle) -> None:
    """Records the run at the store, under epoch 0: as it is before its first owner."""
    async with open_channel(store.target, token=store.token(Role.SERVICE)) as channel:
        leases = StoreRunLeases(channel, owner="a", storage="s", address=lambda: "a:1", ttl_s=60)
        await leases.create([RunRecord(training_run=RUN, policy="p", record=b"x")], request_id="r")


async def losses(stubs: Stubs) -> list[tuple[float, float]]:
    answer = await stubs.run_history.GetRunMetrics(pb.GetRunMetricsRequest(training_runs=[RUN], metrics=["loss"]))
    return [point for each in answer.runs[0].curves for point in zip(each.positions, each.values, strict=True)]


async def until_losses(stubs: Stubs, expected: list[tuple[float, float]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await losses(stubs) != expected:  # noqa: ASYNC110  # what the store has is watched
            await asyncio.sleep(0.02)


def measure(runs: RunRegistry, step: int, loss: float) -> None:
    rewards = RewardDistribution(values=[0.0, 1.0], counts=[3, step])
    runs.entry(RUN).events.step_done(StepMetrics(step=step, values={"loss": loss}, rewards=rewards))


async def test_steps_notices_and_rollbacks_reach_the_store_and_outlive_the_service(
    database_url: str, tmp_path: Path
) -> None:
    async with (
        running_store(database_url) as store,
        open_channel(store.target, token=store.token(Role.SERVICE)) as channel,
    ):
        stubs = await store.stubs(role=Role.READER)
        await recorded(store)
        with RunStorage(tmp_path / "state") as storage:
            runs = RunRegistry(storage, clock=now)
            runs.add(training_run())
            async with delivering(runs, channel):
                runs.move(RUN, RunState.RUNNING)
                for step, loss in ((1, 3.0), (2, 2.0), (3, 9.0)):
                    measure(runs, step, loss)
                runs.entry(RUN).events.notify("warning", "The loss grows.")
                await until_losses(stubs, [(1, 3.0), (2, 2.0), (3, 9.0)])
                runs.move(RUN, RunState.PAUSED)
                runs.rollback(RUN, sequence=1, step=1)
                await until_losses(stubs, [(1, 3.0)])
        with RunStorage(tmp_path / "state") as storage:  # the next process of the service
            runs = RunRegistry(storage, clock=now)
            for run, files in storage.runs():
                runs.restore(run, files)
            measure(runs, 2, 1.5)
            async with delivering(runs, channel):
                await until_losses(stubs, [(1, 3.0), (2, 1.5)])
        notices = (await stubs.run_history.ListRunNotices(pb.ListRunNoticesRequest(training_run=RUN))).notices
        assert [(each.message, each.step) for each in notices] == [("The loss grows.", 3)]
        request = pb.ListRewardDistributionsRequest(training_run=RUN)
        steps = (await stubs.run_history.ListRewardDistributions(request)).steps
        assert [(each.step, list(each.rewards.counts)) for each in steps] == [(1, [3, 1]), (2, [3, 2])]


async def test_a_run_whose_project_is_gone_and_a_measurement_that_is_refused_hold_up_nothing_else(
    database_url: str, tmp_path: Path
) -> None:
    with RunStorage(tmp_path / "state") as storage:
        runs = RunRegistry(storage, clock=now)
        for name in ("projects/gone/trainingRuns/first", RUN):
            runs.add(training_run(name=name))
            runs.move(name, RunState.RUNNING)
        measure(runs, 1, 3.0)
        runs.entry(RUN).events.step_done(StepMetrics(step=2, values={"loss": 2.0, "x" * 200: 1.0}))
        measure(runs, 3, 1.0)
        async with (
            running_store(database_url) as store,
            open_channel(store.target, token=store.token(Role.SERVICE)) as channel,
        ):
            await recorded(store)
            async with delivering(runs, channel):
                await until_losses(await store.stubs(role=Role.READER), [(1, 3.0), (3, 1.0)])


async def test_what_was_measured_while_the_store_was_away_is_delivered_when_it_is_back(
    database_url: str, tmp_path: Path
) -> None:
    with RunStorage(tmp_path / "state") as storage:
        runs = RunRegistry(storage, clock=now)
        runs.add(training_run())
        async with running_store(database_url) as store:
            port = store.port
            await recorded(store)
            token = store.token(Role.SERVICE)
        async with open_channel(f"127.0.0.1:{port}", token=token) as channel, delivering(runs, channel):
            measure(runs, 1, 3.0)
            await asyncio.sleep(0)
            async with running_store(database_url, port=port) as store:
                await until_losses(await store.stubs(role=Role.READER), [(1, 3.0)])
