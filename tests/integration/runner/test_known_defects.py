"""What runners of Agent Lightning 0.3 and 1.0 got wrong, one test for each defect.

A name alone is a test of this file; `file::test` proves the same where the feature is tested.

- a cancel is a word in the store, and a late finish undoes it -> test_outcomes::test_a_running_rollout_is_cancelled,
  test_cancel::test_a_cancel_ends_within_the_grace_although_the_runner_is_silent
- a runner that cannot read a resource drops its rollout for ever -> test_stranding_by_a_failed_read_does_not_happen
- a failure between taking a rollout and beginning its attempt strands it -> test_runner_fleet (tests/chaos): every rollout
  ends, whoever dies when
- idle runners look for work every five seconds -> test_waiting_for_the_next_poll_does_not_happen
- a span that ends during another rollout is given to that one -> test_spans_of_the_wrong_rollout_do_not_happen,
  test_hostile_writes::test_whatever_an_agent_writes_is_its_own
- the tracer loses spans without a word -> test_outcomes::test_spans_that_are_not_confirmed_make_it_infra,
  test_executor::test_an_attempt_whose_spans_were_not_acknowledged_is_not_complete,
  test_delivery::test_a_store_that_is_killed_loses_and_doubles_nothing_that_agents_emit
- spans and results that come after the end change it
  -> test_reports::test_a_result_whose_acknowledgement_was_lost_is_recorded_once, store/test_known_defects::test_terminal_is_terminal
- zombies of lost attempts may report -> test_reports::test_agents_stop_when_their_leases_are_lost_and_the_runner_continues,
  test_runner_fleet: runners that were held still until their leases were lost
- heartbeats starve behind agents that block -> test_blocked_loop::test_a_blocked_loop_loses_no_lease_and_the_log_says_who_blocks_it
- a hung agent cannot be interrupted, and its runner hangs with it -> test_hostile_agents, row `hangs`,
  test_own_process::test_what_blocks_is_killed_and_frees_its_slot, test_reports::test_a_thread_that_cannot_be_stopped_keeps_its_slot
- a missing reward is 0 or None -> test_hostile_agents, row `gives_nothing`
- why an agent failed is in the log of a machine only -> test_outcomes::test_outcomes_are_typed_and_explained
- a dead worker costs its rollout, or twenty minutes -> test_lifecycle::test_another_runner_finishes_what_a_killed_one_began
- one rollout at a time in a process -> test_identities::test_200_attempts_at_once_each_carry_their_own_key_within_the_memory_budget
- who a call belongs to is a global of the process -> test_mixing::test_a_hundred_agents_at_once_keep_to_their_own
- two controllers run everything twice -> test_runner_fleet: the ledger of attempts that began
"""

from __future__ import annotations

from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

AGENT = """
import asyncio
from pathlib import Path
from opentelemetry import trace

kept = []

async def one(task): return 1
async def keeps_a_span(task):
    kept.append(trace.get_tracer("late").start_span("late"))
    return 1
async def ends_the_span(task):
    kept.pop().end()
    return 1
"""
FILES = {"agent.py": AGENT}


async def test_stranding_by_a_failed_read_does_not_happen(world: World) -> None:
    agent = await world.publish(FILES, python="agent.py:one")
    # More than the tries of one call: the first attempt cannot get its agent at all.
    world.double.failing_reads = 6
    await world.start(slots=1)
    [name] = await world.store.create(rollouts_of(agent, [{}]))
    ended = (await world.store.ended([name]))[name]
    assert [each.kind for each in ended] == ["INFRA", ""]


async def test_waiting_for_the_next_poll_does_not_happen(world: World) -> None:
    agent = await world.publish(FILES, python="agent.py:one")
    await world.start(slots=4)
    # The runner has said how much it takes; nothing more is asked for before work is there, and it is sent at once.
    await world.double.until(lambda: world.double.credit_count() == 4)
    names = await world.store.create(rollouts_of(agent, [{}] * 4))
    assert len(world.double.held_attempts()) == 4
    ended = await world.store.ended(names)
    assert [each.kind for name in names for each in ended[name]] == [""] * 4


async def test_spans_of_the_wrong_rollout_do_not_happen(world: World) -> None:
    await world.start(slots=1)
    names = []
    for target in ("keeps_a_span", "ends_the_span"):
        agent = await world.publish(FILES, python=f"agent.py:{target}")
        names += await world.store.create(rollouts_of(agent, [{}]))
        await world.store.ended(names)
    await world.double.until(lambda: any(span.name == "late" for span in world.double.otlp_spans))
    [span] = [span for span in world.double.otlp_spans if span.name == "late"]
    attributes = {each.key: each.value.string_value for each in span.attributes}
    assert attributes["fulmen.rollout"] == names[0]
