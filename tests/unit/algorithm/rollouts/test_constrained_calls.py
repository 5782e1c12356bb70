"""Answers that were constrained by a format or a choice of tools train only where there was something to choose."""

import json

import pytest

from fulmen_algorithm.algorithms.sampling import sequence_row
from fulmen_algorithm.clients.decode import rollout_trajectory
from fulmen_algorithm.training.engine_mismatch import is_fresh
from fulmen_algorithm.training.rows import NO_VERSION, calls_per_rollout
from tests.support.algorithm.run_service import notices, with_settings
from tests.support.sdk.trajectory_cases import PlainCall, chunk_of, records_of

SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
TWO = {"prompts_per_step": 4, "group_size": 4, "refill_limit": 4.0, "max_staleness": 0, "steps": 2}


def asked(**fields: object) -> PlainCall:
    """Returns a call of three tokens, of which the first and the last had no alternative."""
    messages = [{"role": "user", "content": "1+1="}]
    request = json.dumps({"model": "tiny", "messages": messages, **fields})
    return PlainCall(prompt=[1, 1], completion=[2, 3, 4], logprobs=[0.0, -0.5, 0.0], version=1, request=request)


def read(call: PlainCall):
    [sequence] = rollout_trajectory([chunk_of(records_of([call], []))]).sequences
    return sequence


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": SCHEMA},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "look_up"}}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"guided_json": {"type": "object"}},
    ],
)
def test_tokens_without_an_alternative_are_known_where_the_answer_was_constrained(fields):
    assert read(asked(**fields)).forced == (False, False, True, False, True)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"response_format": None},
        {"guided_json": None},
    ],
)
def test_a_token_of_an_answer_that_was_free_is_never_without_an_alternative(fields):
    assert read(asked(**fields)).forced == ()


def test_a_text_that_speaks_of_a_format_constrains_nothing():
    call = asked(messages=[{"role": "user", "content": '"response_format" and "tool_choice": "required"'}])
    [row] = rollout_trajectory([chunk_of(records_of([call], []))]).sequences
    assert not row.calls[0].constrained


def test_what_was_forced_does_not_train_and_is_still_of_the_call():
    sequence = read(asked(response_format=SCHEMA))
    row = sequence_row(
        "a", sequence, advantages=(0.0, 0.0, 2.0, 2.0, 2.0), versions=(-1, -1, 7, 7, 7), forced=sequence.forced
    )
    assert row.loss_mask == (False, False, False, True, False)
    assert row.advantages == (0.0, 0.0, 0.0, 2.0, 0.0)
    assert row.old_logprobs == (0.0, 0.0, 0.0, -0.5, 0.0)
    assert row.policy_versions == (NO_VERSION, NO_VERSION, NO_VERSION, 7, NO_VERSION)
    assert calls_per_rollout([row]) == 1.0
    assert not is_fresh(row, current_version=7), "the engine's probabilities are those of the constrained distribution"


async def test_a_run_trains_on_what_was_chosen_and_says_how_much_was_not(world, grpo_draft, carry_out):
    world.in_order, world.reward_of = True, lambda name: float(name.endswith(".0"))
    world.answer_tokens, world.forced, world.turns = 4, 1, 2
    entry = await carry_out(with_settings(grpo_draft, validated=False, **TWO))
    told = [text for text in notices(entry) if "were constrained" in text]
    assert len(told) == 1
    assert "32 of 32 model calls" in told[0]
    assert "25% of their tokens had no alternative and do not train" in told[0]
    last = entry.events.steps()[-1].values
    assert (last["tokens_forced"], last["tokens"]) == (32.0, 96.0)


async def test_a_step_in_which_everything_was_forced_changes_nothing(world, grpo_draft, carry_out):
    world.reward_of = lambda name: float(name.endswith(".0"))
    world.answer_tokens, world.forced = 2, 2
    entry = await carry_out(with_settings(grpo_draft, validated=False, **TWO))
    assert any("none of its 2 steps changed the weights" in text for text in notices(entry))


async def test_an_engine_that_reports_probabilities_before_the_constraint_is_found_out(world, grpo_draft, carry_out):
    world.reward_of = lambda name: float(name.endswith(".0"))
    world.answer_tokens, world.forced = 20, 0
    entry = await carry_out(with_settings(grpo_draft, validated=False, **TWO))
    told = [text for text in notices(entry) if "--logprobs-mode processed_logprobs" in text]
    assert len(told) == 1
