"""A run whose budget is used up is paused, and goes on from its checkpoint when it is resumed."""

from __future__ import annotations

from fulmen.errors import BudgetExceeded
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import Service, created, follow, until

WHY = "The budget of $5.00 of run/small in projects/default is used up: $5.01 are spent. To continue: `fulmen project update`."


async def test_a_run_is_paused_when_its_rollouts_are_refused_and_succeeds_after_it_is_resumed(
    service: Service, world: World, grpo_draft: RunDraft
) -> None:
    run = await created(grpo_draft, world)
    world.refuses = BudgetExceeded(WHY, subject="run/small")
    service.runs.add(run)
    paused = await until(service, run.name, RunState.PAUSED)
    assert not paused.failure_message
    world.refuses = None
    service.runs.resume(run.name)
    assert (await service.finish(run)).state is RunState.SUCCEEDED
    events = await follow(service.runs.entry(run.name).events, 0)
    notices = [each.notice.message for each in events if each.notice is not None]
    assert f"{WHY} Then `fulmen run resume`." in notices
