"""What attempts cost by their time counts for budgets, and a budget that is used up stops what it pays for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest

from fulmen.errors import BudgetExceeded
from fulmen.store.v1 import project_service_pb2, rollout_service_pb2
from fulmen.store.v1 import usage_service_pb2 as usage_pb
from fulmen.store.v1.model_limits_pb2 import ModelLimits, SpendBudget
from fulmen_store.settings import StoreSettings
from fulmen_store.usage.compute import ComputePrices
from tests.support.store.running import LIMIT_S, Runner, Stubs, create, queue_stats, running_store

DEFAULT = "projects/default"
RUN = "projects/default/trainingRuns/costly"
# An attempt of any length uses up a millionth of a dollar.
PRICES = {"gpu=a100": 1e6, "*": 0.0}


async def set_budgets(stubs: Stubs, *budgets: SpendBudget) -> None:
    """Replaces the budgets of the project."""
    project = (await stubs.projects.GetProject(project_service_pb2.GetProjectRequest(name=DEFAULT))).project
    project.model_limits.CopyFrom(ModelLimits(budgets=budgets))
    await stubs.projects.UpdateProject(project_service_pb2.UpdateProjectRequest(project=project))


async def spent(stubs: Stubs) -> dict[str, int]:
    """Returns what is spent by subject."""
    answer = await stubs.projects.GetProject(project_service_pb2.GetProjectRequest(name=DEFAULT))
    return {each.subject: each.spent_micros for each in answer.project.model_limits.budgets}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits until a condition of the store holds."""
    async with asyncio.timeout(LIMIT_S):
        while not await condition():  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.05)


async def ended_attempt(stubs: Stubs, runner: Runner, **fields: str) -> None:
    """Runs a rollout to its end."""
    await create(stubs, **fields)
    await runner.complete(await runner.take(1))


async def test_attempts_of_a_labelled_runner_use_up_a_projects_budget_which_pauses_its_queue_until_it_is_raised(
    database_url: str,
) -> None:
    async with running_store(database_url, compute_prices=PRICES) as store:
        stubs = await store.stubs()
        await set_budgets(stubs, SpendBudget(subject="project", limit_micros=1))
        cheap = await Runner(stubs).open()
        await ended_attempt(stubs, cheap)
        await cheap.stream.done_writing()  # its session ends
        dear = await Runner(stubs).open(labels={"gpu": "a100"})
        await ended_attempt(stubs, dear)

        async def paused() -> bool:
            return (await queue_stats(stubs)).HasField("pause_time")

        await until(paused)
        cost = (await spent(stubs))["project"]
        assert cost > 0
        reason = (await queue_stats(stubs)).pause_reason
        assert reason.startswith("The budget of $0.00 of projects/default is used up: $")
        assert "`fulmen project update default --budget project=DOLLARS`" in reason
        group = usage_pb.GetUsageRequest(project=DEFAULT, group_by=usage_pb.USAGE_GROUPING_MODEL)
        assert [(each.name, each.usage.cost_micros) for each in (await stubs.usage.GetUsage(group)).groups] == [
            ("compute", cost)
        ]

        await create(stubs)  # waits
        await set_budgets(stubs, SpendBudget(subject="project", limit_micros=10**15))

        async def resumed() -> bool:
            return not await paused()

        await until(resumed)
        assert len(await dear.take(1)) == 1


async def test_a_runs_budget_that_is_used_up_refuses_its_new_rollouts_and_no_others(database_url: str) -> None:
    async with running_store(database_url, compute_prices=PRICES) as store:
        stubs = await store.stubs()
        await set_budgets(stubs, SpendBudget(subject="run/costly", limit_micros=1))
        runner = await Runner(stubs).open(labels={"gpu": "a100"})
        await ended_attempt(stubs, runner, training_run=RUN)

        seen: list[BudgetExceeded] = []

        async def refused() -> bool:
            try:
                await create(stubs, training_run=RUN)
            except BudgetExceeded as error:
                seen.append(error)
                return True
            return False

        await until(refused)
        assert seen[0].metadata["subject"] == "run/costly"
        assert "`fulmen project update default --budget run/costly=DOLLARS`" in str(seen[0])
        await create(stubs)
        await set_budgets(stubs)

        async def accepted() -> bool:
            return not await refused()

        await until(accepted)


async def test_a_queue_that_somebody_paused_is_not_resumed_by_a_budget(database_url: str) -> None:
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        await stubs.rollouts.PauseQueue(rollout_service_pb2.PauseQueueRequest(reason="The machine room is hot."))
        await store.parts.roles["budget-watch"].look()
        assert (await queue_stats(stubs)).pause_reason == "The machine room is hot."


def test_the_dearest_label_of_a_runner_counts_by_the_hour() -> None:
    prices = ComputePrices({"gpu=a100": 3.6, "zone=eu": 1.0, "*": 0.36})
    assert prices.micros({"gpu": "a100", "zone": "eu"}, 10) == pytest.approx(10_000)
    assert prices.micros({"gpu": "none"}, 10) == pytest.approx(1_000)
    assert ComputePrices({}).micros({"gpu": "a100"}, 10) == 0


def test_prices_of_what_is_no_label_are_refused_together() -> None:
    with pytest.raises(ValueError, match=re.escape("gpu, zone=eu: give `label=value` or `*`")):
        StoreSettings(database_url="postgresql://x", dev_mode=True, compute_prices={"gpu": 1, "zone=eu": -1})
