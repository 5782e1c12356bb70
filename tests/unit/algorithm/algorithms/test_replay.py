"""`replay` trains on stored groups: no rollout twice in an epoch, the same books wherever the process was killed."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.errors import SettingsInvalid
from fulmen.scores import GraderIdentity, Problem, RolloutScore, Scores, Source, write_scores
from fulmen_algorithm.algorithms.replay import StoredGroups
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.rollouts.scored_groups import scored_groups
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import created, kills, run_folder, with_settings
from tests.support.algorithm.training import read_consumed
from tests.support.soak import long_after

TRIALS = 4
GROUPS = 5
STORED_VERSION = 900


def score(group: str, number: int, value: float | None) -> RolloutScore:
    """Makes a score; None is a rollout that the grader failed on."""
    name = f"projects/default/rollouts/stored.{group}.{number}"
    rewards = {} if value is None else {("reward", None, b""): value}
    problem = Problem(kind="AGENT_ERROR", message="no") if value is None else None
    return RolloutScore(
        rollout=name, attempt=f"{name}/attempts/1", training_run="projects/default/trainingRuns/old", group=group, rewards=rewards,
        problem=problem,
    )  # fmt: skip


def packed(rollouts: list[RolloutScore]) -> bytes:
    grader = GraderIdentity(kind="python", entry="b.py:grade")
    return write_scores(Scores(grader=grader, source=Source(), rollouts=tuple(rollouts)))


STORED = [
    *(score(f"train/{group}", number, float(number % 2)) for group in range(GROUPS) for number in range(3)),
    *(score("train/flat", number, 1.0) for number in range(3)),
    score("train/few", 0, 1.0),
    score("train/few", 1, None),
    score("", 0, 1.0),
]


@pytest.fixture
def draft(grpo_draft: RunDraft, world: World) -> RunDraft:
    world.add_resource("resources/scores.better", packed(STORED))
    world.sampled_with |= {each.attempt: STORED_VERSION for each in STORED}
    made = with_settings(grpo_draft, algorithm="replay", checkpoint_every=1, group_size=None, max_staleness=None)
    inputs = {use: made.inputs[use] for use in ("agent", "validation_tasks")}
    return replace(made, inputs={**inputs, "scores": "resources/scores.better/versions/1"})


def check(tmp_path: Path) -> None:
    """Checks that two epochs (2, 2 and 1 groups, then 2) trained every group as often as they should."""
    lines = read_consumed(run_folder(tmp_path))
    assert [line["group"] for line in lines] == list(range(7))
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 3, 4, 4]
    assert {line["outcome"] for line in lines} == {"trained"}
    first = [line["rollouts"][0].rpartition(".")[0] for line in lines[:GROUPS]]
    assert sorted(first) == [f"projects/default/rollouts/stored.train/{group}" for group in range(GROUPS)]
    assert len({line["rollouts"][0] for line in lines[GROUPS:]}) == 2


@pytest.mark.parametrize("trial", long_after(2, range(TRIALS)))
async def test_stored_groups_are_trained_on_once_an_epoch_however_often_the_process_is_killed(
    trial, world, draft, carry_out, tmp_path
):
    world.chance = random.Random(trial)
    entry = await carry_out(draft, killed=kills(world.chance, calls=14, lives=4) if trial else ())
    check(tmp_path)
    assert not [name for name in world.groups if name.startswith("train/")], "no training rollout is made"
    assert {"validation_accuracy_before", "validation_accuracy_after"} <= set(entry.run.results)
    assert entry.run.results["groups_stored"] == GROUPS
    assert entry.run.results["groups_stored_no_variance"] == entry.run.results["groups_stored_too_few_scored"] == 1
    assert world.served is not None
    assert entry.run.policy_version == world.served.name
    metrics = entry.events.steps()[-1].values
    assert {"importance_mean", "effective_sample_share", "capped_share"} <= set(metrics)
    assert not [name for name in metrics if name.startswith("staleness")]


async def test_without_validation_tasks_no_agent_is_needed_and_nothing_is_served(world, draft, carry_out):
    final = (await carry_out(replace(draft, inputs={"scores": draft.inputs["scores"]}))).run
    assert final.policy_version
    assert not world.groups
    assert world.served is None


@pytest.mark.parametrize(
    ("setting", "answer_tokens", "truncated", "cause"),
    [
        ({"token_budget": 16}, 20, False, "longer than 16 tokens (token_budget): "),
        ({"mask_truncated": True}, 2, True, "ended at its token limit (mask_truncated; max_tokens): "),
    ],
)
async def test_a_run_whose_stored_rollouts_cannot_be_used_fails_and_says_why(
    world, draft, carry_out, setting, answer_tokens, truncated, cause
):
    world.answer_tokens, world.truncated = answer_tokens, truncated
    final = (await carry_out(with_settings(draft, prompts_per_step=8, **setting), state=RunState.FAILED)).run
    assert f"No rollout of {GROUPS} groups could be used" in final.failure_message
    assert cause in final.failure_message


@pytest.mark.parametrize(
    ("content", "inputs", "problem"),
    [
        (b"not scores", {}, "inputs.scores: not a file of scores"),
        (packed([score("a", 0, 1.0), score("a", 1, 1.0), score("b", 0, 1.0)]), {}, "no group can be trained on: 1"),
        (packed(STORED), {"train_tasks": "resources/dataset.train/versions/1"}, "inputs.train_tasks: is not used"),
        (packed(STORED), {"agent": ""}, "inputs.agent: is required to validate"),
    ],
)
async def test_a_run_that_could_not_train_is_not_created(content, inputs, problem, world, draft):
    name = world.add_resource("resources/scores.other", content)
    named = {**draft.inputs, "scores": name, **inputs}

    with pytest.raises(SettingsInvalid) as caught:
        await created(replace(draft, inputs={use: each for use, each in named.items() if each}), world)

    assert any(problem in f"{each.field}: {each.description}" for each in caught.value.violations)


@given(
    count=st.integers(1, 7), size=st.integers(1, 9), steps=st.integers(1, 9), seed=st.integers(0, 99),
    killed_at=st.integers(0, 8),
)  # fmt: skip
@settings(deadline=None)
async def test_every_epoch_has_every_group_once_and_no_step_has_one_twice(count, size, steps, seed, killed_at):
    groups = [(FinishedRollout(name=str(n), attempt="", succeeded=True, reward=0.0),) for n in range(count)]
    taken: list[FinishedGroup] = []
    source = StoredGroups(groups, seed=seed)
    for step in range(steps):
        if step == killed_at:
            source = StoredGroups(groups, seed=seed)
        source.begin_step(len(taken))
        found = (
            [*await source.poll(limit=1), *await source.poll(limit=size - 1)]
            if size > 1
            else await source.poll(limit=1)
        )
        assert found
        assert len({each.rollouts[0].name for each in found}) == len(found) <= size
        taken += found
    assert [each.index for each in taken] == list(range(len(taken)))
    for start in range(0, len(taken), count):
        epoch = [each.rollouts[0].name for each in taken[start : start + count]]
        assert len(set(epoch)) == len(epoch)


def test_rollouts_are_grouped_by_run_and_group_and_useless_groups_are_counted():
    other = [
        replace(each, training_run="projects/default/trainingRuns/other") for each in STORED if each.group == "train/0"
    ]

    found = scored_groups([*STORED, *other])

    assert [len(group) for group in found.groups] == [3] * (GROUPS + 1)
    assert (found.no_variance, found.too_few) == (1, 1)
