"""Runs of `dpo` and `kto` learn from pairs, from published scores and from the stored rollouts of another run."""

import json
import random
from dataclasses import replace

import pytest

from fulmen.errors import SettingsInvalid
from fulmen.scores import GraderIdentity, RolloutScore, Scores, Source, write_scores
from fulmen_algorithm.algorithms.offline.answers import Answer, best_against_worst, split
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.training.rows import row_from_completion
from tests.support.algorithm.model_services import World
from tests.support.algorithm.preferences import add_preferences, preference
from tests.support.algorithm.run_service import created, kills, notices, with_settings

OTHER = "projects/default/trainingRuns/other"
PAIRS = 20
STEPS = 12
LEARNS = {
    "steps": STEPS, "batch_size": 16, "report_every": 4, "checkpoint_every": 3, "learning_rate": 0.01, "held_out": 0.2,
    "schedule": "constant", "warmup_steps": 0,
}  # fmt: skip


def pairs_draft(draft: RunDraft, world: World, **settings: object) -> RunDraft:
    name = add_preferences(world, PAIRS)
    return replace(draft, inputs={"preferences": name}, settings_json=json.dumps({**LEARNS, **settings}))


def rollout(name: str, reward: float | None) -> FinishedRollout:
    full = f"projects/default/rollouts/{name}"
    return FinishedRollout(name=full, attempt=f"{full}/attempts/1", succeeded=reward is not None, reward=reward)


def stored_draft(draft: RunDraft, world: World, rewards: dict[str, list[float | None]], **settings: object) -> RunDraft:
    world.others[OTHER] = [
        FinishedGroup(
            group_id=group, rollouts=tuple(rollout(f"{group}.{n}", reward) for n, reward in enumerate(each)), cursor=""
        )
        for group, each in rewards.items()
    ]
    world.sampled_with |= {r.attempt: 1 for group in world.others[OTHER] for r in group.rollouts}
    return replace(draft, inputs={"rollouts": OTHER}, settings_json=json.dumps({**LEARNS, **settings}))


@pytest.mark.parametrize(("algorithm", "settings"), [("dpo", {}), ("kto", {"steps": 3 * STEPS, "beta": 0.5})])
async def test_answers_to_prompts_that_were_held_out_are_told_apart_in_seconds(
    algorithm, settings, world, sft_draft, carry_out
):
    draft = replace(pairs_draft(sft_draft, world, **settings), algorithm=algorithm)
    entry = await carry_out(draft)
    results = entry.run.results
    assert results["validation_accuracy_before"] == 0.5
    assert results["validation_accuracy_after"] >= 0.9
    assert entry.run.policy_version == "resources/policy.tiny/versions/1"
    first, *_, last = [s.values for s in entry.events.steps() if "loss" in s.values]
    assert last["loss"] < first["loss"]
    # Four prompts of twenty, each with two answers.
    assert results["examples_held_out"] == (4 if algorithm == "dpo" else 8)
    assert results["examples"] == (16 if algorithm == "dpo" else 32)


@pytest.mark.parametrize("loss", [{"kind": "ipo", "beta": 0.3}, {"kind": "sigmoid", "label_smoothing": 0.1}])
async def test_the_other_losses_of_pairs_learn_too(loss, world, sft_draft, carry_out):
    entry = await carry_out(replace(pairs_draft(sft_draft, world, loss=loss), algorithm="dpo"))
    assert entry.run.results["validation_accuracy_after"] >= 0.9


async def test_adapters_are_trained_against_the_model_without_them(world, sft_draft, carry_out):
    draft = pairs_draft(sft_draft, world, lora={"rank": 8}, learning_rate=0.05, steps=2 * STEPS)
    entry = await carry_out(replace(draft, algorithm="dpo"))
    assert entry.run.results["validation_accuracy_before"] == 0.5
    assert entry.run.results["validation_accuracy_after"] >= 0.9


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
async def test_a_run_that_is_killed_ends_with_the_weights_of_one_that_is_not(
    algorithm, world, sft_draft, carry_out, tmp_path
):
    draft = replace(pairs_draft(sft_draft, world, checkpoint_every=1), algorithm=algorithm)
    whole = await carry_out(draft)
    again = replace(draft, name="projects/default/trainingRuns/killed")
    killed = await carry_out(again, killed=kills(random.Random(3), calls=4, lives=3))
    assert killed.run.results["loss"] == pytest.approx(whole.run.results["loss"], rel=1e-6)


REWARDS = {"train/0": [1.0, 0.0, 0.5, None], "train/1": [0.5, 0.9], "train/2": [1.0, 1.0, 1.0], "train/3": [0.0, 1.0]}


async def test_the_best_rollout_of_a_group_is_preferred_to_the_worst(world, sft_draft, carry_out):
    world.turns = 2
    draft = replace(stored_draft(sft_draft, world, REWARDS, held_out=0), algorithm="dpo")
    entry = await carry_out(draft)
    assert entry.run.results["examples"] == 3
    assert any("4 stored groups give 3 pairs." in text for text in notices(entry))
    assert entry.events.steps()[-1].values["accuracy"] == 1.0


async def test_single_rollouts_are_desirable_from_a_threshold_on(world, sft_draft, carry_out):
    draft = replace(stored_draft(sft_draft, world, REWARDS, held_out=0, threshold=0.9), algorithm="kto")
    entry = await carry_out(draft)
    assert (entry.run.results["desirable"], entry.run.results["undesirable"]) == (6, 4)
    assert entry.events.steps()[-1].values["desirable_share"] == pytest.approx(0.6, abs=0.11)
    assert entry.events.steps()[-1].values["accuracy"] >= 0.9


def published(world: World, groups: dict[str, list[float]]) -> str:
    made = [
        RolloutScore(
            rollout=each.name, attempt=each.attempt, training_run=OTHER, group=group,
            rewards={("helpful", None, b""): value, ("reward", None, b""): value},
        )
        for group, values in groups.items()
        for number, value in enumerate(values)
        for each in [rollout(f"{group or 'alone'}.{number}", value)]
    ]  # fmt: skip
    world.sampled_with |= {each.attempt: 1 for each in made}
    content = write_scores(
        Scores(grader=GraderIdentity(kind="people", entry="helpful"), source=Source(), rollouts=tuple(made))
    )
    return world.add_resource("resources/scores.people", content)


async def test_scores_of_people_are_learned_from(world, sft_draft, carry_out):
    scores = published(world, {"a": [1.0, 4.0, 2.0], "b": [3.0, 3.0]})
    draft = replace(sft_draft, algorithm="dpo", inputs={"scores": scores}, settings_json=json.dumps(LEARNS))
    assert (await carry_out(draft)).run.results["examples"] == 1


async def test_scores_without_groups_are_enough_for_single_answers_and_nothing_for_pairs(world, sft_draft, carry_out):
    scores = published(world, {"": [0.0, 1.0, 1.0]})
    draft = replace(sft_draft, inputs={"scores": scores}, settings_json=json.dumps(LEARNS))
    with pytest.raises(SettingsInvalid) as caught:
        await created(replace(draft, algorithm="dpo"), world)
    assert "no group can be trained on" in caught.value.violations[0].description
    entry = await carry_out(with_settings(replace(draft, algorithm="kto"), held_out=0))
    assert entry.run.results["desirable"] == 2


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        ("dpo", {"min_gap": 2.0}, "There is no pair to train on: in none of 4 stored groups"),
        ("kto", {"threshold": 2.0}, "0 of 10 usable answers have a reward of 2 or more (threshold)"),
        ("dpo", {"steps": 2, "warmup_steps": 2, "token_budget": 16}, ""),
    ],
)
async def test_a_run_with_nothing_to_learn_from_fails_and_says_why(
    algorithm, settings, message, world, sft_draft, carry_out
):
    draft = replace(stored_draft(sft_draft, world, REWARDS, **settings), algorithm=algorithm)
    entry = await carry_out(draft, state=RunState.FAILED if message else RunState.SUCCEEDED)
    assert entry.run.failure_message.startswith(message)


async def test_all_problems_of_preferences_and_settings_are_reported_at_once(world, sft_draft):
    lines = [
        {"prompt": [{"role": "user", "content": "1"}], "chosen": []},
        {"prompt": [{"role": "user", "content": "1"}], "chosen": [{"role": "user", "content": "2"}], "rejected": [{"role": "nobody"}]},
        preference(1) | {"rejected": preference(1)["chosen"]},
    ]  # fmt: skip
    name = world.add_resource("resources/dataset.preferences", "\n".join(map(json.dumps, lines)).encode())
    draft = replace(
        sft_draft, algorithm="kto", inputs={"preferences": name}, settings_json=json.dumps({"batch_size": 1, "beta": 0})
    )
    with pytest.raises(SettingsInvalid) as caught:
        await created(draft, world)
    found = [f"{each.field}: {each.description}" for each in caught.value.violations]
    assert any(text.startswith("settings.beta") for text in found), found
    assert "inputs.preferences:1: needs a list of messages `chosen`, `rejected`" in found
    assert "inputs.preferences:2: chosen: has no message with the role assistant" in found
    assert "inputs.preferences:3: `chosen` and `rejected` are the same" in found


def test_pairs_of_a_group_go_from_its_ends_to_its_middle_and_never_join_equal_rewards():
    row = row_from_completion(
        rollout_id="", prompt_ids=[1], completion_ids=[2], logprobs=[0.0], advantage=0.0, version=0
    )
    answers = {
        name: Answer(name=name, group=name[0], rows=(row,), reward=reward)
        for name, reward in {"a1": 0.0, "a2": 1.0, "a3": 0.4, "a4": 0.6, "a5": 0.5, "b1": 1.0, "b2": 1.0}.items()
    }
    found = best_against_worst(answers, pairs_per_group=9, min_gap=0.1)
    assert [(best.name, worst.name) for best, worst in found] == [("a2", "a1"), ("a4", "a3")]
    assert len(best_against_worst(answers, pairs_per_group=1, min_gap=0.1)) == 1


def test_answers_to_one_prompt_are_held_out_together_and_something_is_always_trained_on():
    groups = ["a", "a", "b", "c", "c"]
    train, held = split(list(range(5)), groups, share=0.4, seed=0)
    assert sorted(train + held) == list(range(5))
    assert len({groups[i] for i in held}) == 1
    assert not {groups[i] for i in held} & {groups[i] for i in train}
    assert split([1], ["a"], share=0.9, seed=0) == ([1], [])
